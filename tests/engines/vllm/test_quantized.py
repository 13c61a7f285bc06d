"""Quantized checkpoints as served, and the drop-in API, on shared engines."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from scoremode.core.engine.base import Wanted
from scoremode.core.engine.baseline import stored_states
from scoremode.core.references.reader import Reference
from scoremode.core.scores.answers import Answers, Window
from scoremode.core.store import runs
from scoremode.core.text.corpus import load
from scoremode.core.verbs.compare import compare
from scoremode.core.verbs.reference import reference
from scoremode.engines.vllm import support
from scoremode.engines.vllm.self_test import CUTS_OFF, SATURATES, activation_notes
from scoremode.engines.vllm.support import has_int4_kernel
from scoremode.errors import InputError, ModelError
from scoremode.values import Floats, Ids
from tests.engines.vllm.conftest import engine_of, ordinary, own, score
from tests.makers import ask

ASKED_FOR = """
from scoremode.engines.vllm.llm import LLM, SamplingParams, TokensPrompt
llm = LLM(model="…-W4A16", quantization="compressed-tensors")
token_ids = llm.get_tokenizer().encode("Your text here")
params = SamplingParams(score_mode=True, temperature=0.0)
out = llm.generate(prompts=[TokensPrompt(prompt_token_ids=token_ids, target_token_ids=token_ids[1:])], sampling_params=params)[0]
nll = -sum(out.prompt_logprobs[i][token_ids[i]].logprob for i in range(1, len(token_ids)))
"""  # noqa: E501  # word for word


@pytest.fixture(scope="module")
def w8a8(smollm2: Path, quantize: Callable[[str, Path, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(str(smollm2), tmp_path_factory.mktemp("w8a8"), "w8a8")


@pytest.fixture(scope="module")
def ran(w8a8: Path) -> Iterator[dict[str, Any]]:
    """The code of the issue; only the name of the model is filled in (W8A8, which vLLM serves on every CPU)."""
    names: dict[str, Any] = {}
    exec(ASKED_FOR.replace("…-W4A16", str(w8a8)), names)
    yield names
    names["llm"].close()


def test_the_code_that_was_asked_for_runs_word_for_word(ran: dict[str, Any]) -> None:
    out, ids = ran["out"], ran["token_ids"]
    assert ran["nll"] > 0
    assert np.isfinite(ran["nll"])
    assert out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == len(ids)
    assert [list(entry) for entry in out.prompt_logprobs[1:]] == [[i] for i in ids[1:]]
    assert not out.outputs, "nothing is generated"


def test_other_targets_than_the_prompts_own(ran: dict[str, Any]) -> None:
    ids = ran["token_ids"]
    other = [(i + 1) % 1000 for i in ids[1:]]
    prompt = ran["TokensPrompt"](prompt_token_ids=ids, target_token_ids=other)
    (out,) = ran["llm"].generate([prompt], ran["params"])
    assert [list(e) for e in out.prompt_logprobs[1:]] == [[i] for i in other]
    assert out.logprob < ran["out"].logprob
    prompt = ran["TokensPrompt"](prompt_token_ids=[1, 2, 3], target_token_ids=[1, 2, 3])
    with pytest.raises(InputError, match="3 tokens and 3 targets, it needs 2"):
        ran["llm"].generate([prompt], ran["params"])


def gaps(found: list[Answers], windows: list[Window], llm: Any) -> Any:
    """|ours - prompt_logprobs| of every target, from an ordinary engine."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outs = llm.generate([{"prompt_token_ids": w.ids.tolist()} for w in windows], params, use_tqdm=False)
    return np.concatenate(
        [
            np.abs(
                answers.logprob[:, 0]
                - [out.prompt_logprobs[i + 1][int(t)].logprob for i, t in enumerate(window.targets[:, 0])]
            )
            for window, answers, out in zip(windows, found, outs, strict=True)
        ]
    )


def test_w8a8_int8_as_served(ran: dict[str, Any], w8a8: Path, real_ids: Ids) -> None:
    engine = ran["llm"].engine
    assert engine.facts.settings["quantization"] == "compressed-tensors"
    assert (CUTS_OFF in engine.facts.notes) == (not support.rounds_int8_activations())
    windows = [own(real_ids[a : a + 150]) for a in (0, 500)]
    found = score(engine, windows)
    dtype = engine.facts.dtype
    with ordinary(w8a8, dtype=dtype, max_model_len=512, skip_tokenizer_init=True) as llm:
        gap = gaps(found, windows, llm)
    # in bfloat16 stock rounds its logits (about 0.02 nats per token), and the batch of a row decides how its
    # activations round; a shift by one would be off by whole nats
    assert gap.mean() <= (4e-2 if dtype == "bfloat16" else 1e-4)
    assert gap.max() <= (0.5 if dtype == "bfloat16" else 2e-3)
    shifted = np.abs(found[0].logprob[1:, 0] - found[0].logprob[:-1, 0])
    assert shifted.mean() > 1


# ── as served against emulated: the same folder in Transformers, its integers times its scales in float32 ────────────
ASKED: dict[str, Any] = {"method": "gptq", "context_length": 128, "max_windows": 2}


def real_text() -> str:
    return "\n\n".join(load("python-docs").texts())[:4_000]


class Found(NamedTuple):
    """The scores of a candidate, one number per target."""

    kl: Floats  # from the original, nats
    logprob: Floats


@pytest.fixture(scope="module")
def kept(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The original's states on two windows of a real text."""
    folder = tmp_path_factory.mktemp("original") / "reference"
    reference(str(smollm2), folder, dtype="float32", text=real_text(), **ASKED)
    return folder


@pytest.fixture(scope="module")
def w4a16(smollm2: Path, quantize: Callable[[str, Path, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(str(smollm2), tmp_path_factory.mktemp("w4a16"), "w4a16")


@pytest.fixture(scope="module")
def emulated(kept: Path, w8a8: Path, w4a16: Path) -> list[Found]:
    found = []
    for comparison in compare(str(kept), str(w8a8), str(w4a16), dtype="float32"):
        assert comparison.kl is not None
        found.append(Found(comparison.kl, comparison.candidate.scores.logprob))
    return found


@pytest.fixture(scope="module")
def served(kept: Path, ran: dict[str, Any], w4a16: Path) -> list[Found]:
    """W8A8 with the running engine, then W4A16 if this CPU has a kernel for it. Its activations keep 16 bits; by
    default, CPUs with AMX would use 8."""
    found = [against(ran["llm"].engine, kept)]
    if has_int4_kernel():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_CPU_INT4_W4A8", "0")
            with engine_of(w4a16) as engine:
                found.append(against(engine, kept))
    return found


def against(engine: Any, kept: Path) -> Found:
    stored = Reference.open(kept)
    plan = ask("smollm2-135m", text=real_text(), **ASKED).plan
    parts = {
        index: (answers.kl, answers.logprob[:, 0])
        for index, answers in engine.score(
            plan, np.zeros(len(plan), bool), Wanted(against=stored_states(stored, plan.target_offsets))
        )
    }
    return Found(*(np.concatenate([parts[i][k] for i in range(len(plan))]) for k in (0, 1)))


@pytest.mark.parametrize("how", ["emulated", "served"])
def test_fewer_bits_are_further_from_the_original(how: str, kept: Path, request: pytest.FixtureRequest) -> None:
    w8a8, *w4a16 = request.getfixturevalue(how)
    original = runs.load(kept)
    assert max(original.manifest["noise_kl"]) < 1e-6, "what the original differs from itself"
    assert w8a8.kl.mean() > 1e-3
    assert len(w4a16) == (how == "emulated" or has_int4_kernel())
    for fewer in w4a16:
        assert w8a8.kl.mean() < 0.3 * fewer.kl.mean()
        assert (original.scores.logprob - fewer.logprob).mean() > 0.1, "the text became less likely"


def test_served_is_near_emulated(kept: Path, served: list[Found], emulated: list[Found]) -> None:
    """The same mean divergence. Target by target, int8 activations differ: any difference before their rounding gives
    errors of the same size at other targets, so the two are as far apart as each is from the original. On ARM, vLLM
    cuts activations off, and on x86 without VNNI it cuts sums off: W8A8 loses more than its emulation."""
    original = runs.load(kept).scores.logprob
    is_exact = support.rounds_int8_activations() and support.adds_int8_products_exactly()
    for ours, theirs, share in zip(served, emulated[: len(served)], (2.0, 0.2)[: len(served)], strict=True):
        if share > 1 and not is_exact:
            assert ours.kl.mean() > 1.25 * theirs.kl.mean()
            continue
        assert ours.kl.mean() == pytest.approx(theirs.kl.mean(), rel=0.25)
        assert np.abs(ours.logprob - theirs.logprob).mean() < share * np.abs(theirs.logprob - original).mean()


def test_int8_kernels_are_those_of_the_docs() -> None:
    """The kernels themselves. Where a release of vLLM changes this, docs/compare.md must change too."""
    machine = platform.machine().lower()
    assert support.rounds_int8_activations() == (machine not in ("aarch64", "arm64"))
    exact = machine not in ("x86_64", "amd64") or bool(torch.cpu._is_vnni_supported())
    assert support.adds_int8_products_exactly() == exact


INT8 = {"num_bits": 8, "type": "int"}


@pytest.mark.parametrize("exact", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize(
    ("quantization", "asked"),
    [
        ({"config_groups": {"group_0": {"weights": INT8, "input_activations": INT8}}}, True),
        ({"config_groups": {"group_0": {"weights": INT8, "input_activations": None}}}, False),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}, "input_activations": INT8}}}, False),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}, False),
        ({"quant_method": "gptq", "bits": 8}, False),
        (None, False),
    ],
)
def test_a_kernel_that_computes_something_else_is_a_note(
    quantization: Any, asked: bool, on_cpu: bool, exact: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, adds = exact
    monkeypatch.setattr(support, "rounds_int8_activations", lambda: rounds)
    monkeypatch.setattr(support, "adds_int8_products_exactly", lambda: adds)
    expected = [*([] if rounds else [CUTS_OFF]), *([] if adds else [SATURATES])] if asked and on_cpu else []
    assert activation_notes(SimpleNamespace(quantization_config=quantization), on_cpu) == expected


INT4 = {"num_bits": 4, "type": "int"}


@pytest.mark.parametrize(
    "cpu",  # the machine, whether it has AVX-512, whether vLLM has the kernel there
    [("x86_64", True, True), ("x86_64", False, False), ("aarch64", False, False), ("ppc64le", True, False)],
)
@pytest.mark.parametrize(
    ("quantization", "needs_it"),
    [
        ({"config_groups": {"group_0": {"weights": INT4}}}, True),
        ({"config_groups": {"group_0": {"weights": INT4, "input_activations": {"num_bits": 8, "type": "int"}}}}, False),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}}}, False),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}}, False),
        ({"quant_method": "gptq", "bits": 4}, True),
        ({"quant_method": "awq", "w_bit": 4}, True),
        ({"quant_method": "gptq", "bits": 8}, False),
        ({"quant_method": "fp8"}, False),
        (None, False),
    ],
)
def test_which_checkpoints_need_the_int4_kernel_and_which_machines_have_it(
    cpu: tuple[str, bool, bool], quantization: Any, needs_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, avx512, served_here = cpu
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: avx512)
    assert has_int4_kernel() == served_here
    if needs_it and not served_here:
        with pytest.raises(ModelError, match=f"no CPU kernel for int4 weights on {machine}"):
            support.check_int4_on_cpu(quantization)
    else:
        support.check_int4_on_cpu(quantization)


def test_int4_weights_are_refused_where_vllm_has_no_kernel_for_them(
    w4a16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message on aarch64 machines and on x86 without AVX-512, simulated here."""
    if has_int4_kernel():
        monkeypatch.setattr(support, "has_int4_kernel", lambda: False)
    with pytest.raises(ModelError, match=r"no CPU kernel for int4 weights.*--engine transformers"), engine_of(w4a16):
        pass
