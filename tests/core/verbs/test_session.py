"""A model that is loaded once and asked often: the same answers as one-liners, one engine for all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scoremode as sm
from scoremode.core.engine import registry
from scoremode.core.engine.base import Engine
from scoremode.engines.table.engine import TableEngine
from scoremode.errors import EngineError, InputError, OptionError, UnknownArgumentError
from tests.makers import Phases

TEXT = "The dog and the fox went home. " * 6
ASKED: dict[str, Any] = {"context_length": 32, "stride": 16}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Every engine that is opened, in order."""
    found: list[Engine] = []
    original = registry.open_engine

    def opening(*given: Any) -> Engine:
        found.append(original(*given))
        return found[-1]

    monkeypatch.setattr(registry, "open_engine", opening)
    return found


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))


# ── one engine, many questions ───────────────────────────────────────────────────────────────────────────────────────
def test_every_question_is_answered_by_one_engine(tiny: Path, opened: list[Engine], tmp_path: Path) -> None:
    with sm.open(str(tiny)) as model:
        first = model.ppl(text=TEXT, **ASKED)
        second = model.ppl(text=TEXT, method="gptq", context_length=16)
        scores = model.prob("The dog", [" jumps", " went"])
        kept = model.reference(tmp_path / "ref", text=TEXT, **ASKED)
        compared = model.compare(tmp_path / "ref")
    assert len(opened) == 1
    assert first.perplexity.value == kept.perplexity.value
    assert second.manifest["method"] == "gptq"
    assert len(scores) == 2
    assert compared.kl is not None
    assert compared.kl.max() < 1e-6


def test_the_numbers_are_those_of_the_one_liners_and_an_answer_that_is_kept_opens_nothing(
    tiny: Path, opened: list[Engine]
) -> None:
    first = sm.ppl(str(tiny), text=TEXT, **ASKED)
    with sm.open(str(tiny)) as model:
        again = model.ppl(text=TEXT, **ASKED)
        assert not repr(model).endswith("open)")
        assert (first.cached, again.cached, len(opened)) == (False, True, 1)
        run, scores = model.ppl(text=TEXT, fresh=True, **ASKED), model.prob("The dog", " jumps")
    assert np.array_equal(run.scores.logprob, first.scores.logprob)
    assert scores == sm.prob(str(tiny), prompt="The dog", targets=" jumps")


def test_it_closes_and_opens_again_and_an_error_leaves_it_usable(
    opened: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sm.open("table:uniform")
    model.ppl(text="one text")
    model.close()

    def broken(*_: Any) -> Any:
        raise EngineError("it stopped", fix="try again")

    with monkeypatch.context() as changed:
        changed.setattr(TableEngine, "score", broken)
        with pytest.raises(EngineError):
            model.ppl(text="another text")
    assert model.ppl(text="another text").perplexity.value == pytest.approx(256)
    assert len(opened) == 2


def test_two_open_models_are_compared_and_engines_that_were_given_keep_no_folder(
    opened: list[Engine],
) -> None:
    with sm.open("table:uniform") as baseline, sm.open("table:successor") as candidate:
        found = candidate.compare(baseline, text=bytes(range(40, 60)).decode())
    assert found.statistics()["ppl_candidate"] == pytest.approx(1.0)
    assert len(opened) == 2
    uniform, other = TableEngine(np.zeros((1, 256))), TableEngine(np.eye(256))
    with sm.open("table:uniform", engine=uniform) as baseline, sm.open("table:uniform", engine=other) as candidate:
        found = candidate.compare(baseline, text="one text")
    assert (found.baseline.path, found.candidate.path) == (None, None)
    assert len(found.baseline.scores.logprob) == len("one text") - 1


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: sm.open("table:uniform", dtyp="float32"), "did you mean 'dtype'"),  # type: ignore[call-arg]
        (lambda: sm.ppl("table:uniform", txt="a b"), "did you mean 'text'"),  # type: ignore[call-arg]
        (lambda: sm.open("table:uniform").ppl(contxt_length=5), "did you mean 'context_length'"),  # type: ignore[call-arg]
    ],
)
def test_a_misspelled_argument_names_the_nearest(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(UnknownArgumentError, match=says) as caught:
        call()
    assert isinstance(caught.value, TypeError)


def test_options_that_cannot_work_are_refused_at_once(tiny: Path, opened: list[Engine]) -> None:
    for model, option, words in (
        (str(tiny), {"dtype": "float31"}, "--dtype float31"),
        (str(tiny), {"revision": "v2"}, "--revision does not apply"),
        ("table:uniform", {"dtype": "float32"}, "does not apply to the table engine"),
        ("table:uniform", {"method": "gptq"}, "open has no argument method"),
    ):
        with pytest.raises(OptionError, match=words):
            sm.open(model, **option)  # type: ignore[arg-type]
    assert opened == []


def test_an_engine_that_is_given_is_never_closed_and_never_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, closed = TableEngine(np.zeros((1, 256))), []
    monkeypatch.setattr(engine, "close", lambda: closed.append(1))
    with sm.open("table:uniform", engine=engine) as model:
        assert not model.ppl(text="one text").cached
        assert not model.ppl(text="one text").cached
        with pytest.raises(InputError, match="needs a folder"):
            model.reference(text="one text")
    assert closed == []


# ── wrap ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def loaded(tiny: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), AutoTokenizer.from_pretrained(tiny)


def test_a_wrapped_model_gives_the_scores_of_its_files(tiny: Path, loaded: tuple[Any, Any]) -> None:
    run = sm.wrap(*loaded).ppl(text=TEXT, **ASKED)
    assert np.array_equal(run.scores.logprob, sm.ppl(str(tiny), text=TEXT, **ASKED).scores.logprob)
    with pytest.raises(InputError, match="not a causal language model"):
        sm.wrap(torch.nn.Linear(2, 2), loaded[1])


def test_it_goes_back_in_the_mode_that_it_came_in(loaded: tuple[Any, Any]) -> None:
    """Parts that were frozen stay so, also after an error."""
    model, tokenizer = loaded
    model.train()
    model.model.norm.eval()
    before = [module.training for module in model.modules()]
    wrapped = sm.wrap(model, tokenizer)
    wrapped.ppl(text=TEXT, **ASKED)
    assert [module.training for module in model.modules()] == before
    with pytest.raises(InputError):
        wrapped.ppl(text=TEXT, method="llamacpp", context_length=100_000)
    assert [module.training for module in model.modules()] == before


def test_weights_that_change_change_the_answers(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    """Nothing of a question is remembered for the next one, and KL tells how far the model went."""
    model, tokenizer = loaded
    wrapped = sm.wrap(model, tokenizer, name="in training")
    wrapped.reference(tmp_path / "start", text=TEXT, **ASKED)
    at_first = wrapped.compare(tmp_path / "start").statistics()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    later = wrapped.compare(tmp_path / "start").statistics()
    assert at_first["kl_mean"] == pytest.approx(0, abs=1e-9)
    assert later["kl_mean"] > 1e-6
    assert later["ppl_baseline"] == at_first["ppl_baseline"]


@pytest.mark.parametrize("wrapper", ["compiled", "parallel"])
def test_what_others_put_around_a_model_is_looked_through(loaded: tuple[Any, Any], wrapper: str) -> None:
    model, tokenizer = loaded
    around = torch.compile(model) if wrapper == "compiled" else torch.nn.DataParallel(model)
    assert sm.wrap(around, tokenizer).ppl(text=TEXT, **ASKED).perplexity.value > 1


# ── other ways to load ───────────────────────────────────────────────────────────────────────────────────────────────
def test_the_attention_code_can_be_chosen_and_is_part_of_the_identity(tiny: Path) -> None:
    eager = sm.ppl(str(tiny), text=TEXT, attn_implementation="eager", **ASKED)
    usual = sm.ppl(str(tiny), text=TEXT, **ASKED)
    assert eager.manifest["engine_settings"]["attention"] == "eager"
    assert eager.manifest["identity"]["settings"]["attn_implementation"] == "eager"
    assert usual.manifest["engine_settings"]["attention"] != "eager"
    assert np.abs(eager.scores.logprob - usual.scores.logprob).max() < 1e-4


def make_adapter(base: Path, folder: Path, seed: int) -> Path:
    """A LoRA adapter with weights that do something."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


def test_an_adapter_is_scored_as_peft_computes_it(tiny: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter = make_adapter(tiny, tmp_path / "adapter", 1)
    run = sm.ppl(str(tiny), text=TEXT, adapter=str(adapter), **ASKED)
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    judge = peft.PeftModel.from_pretrained(base, str(adapter)).eval()
    ids = AutoTokenizer.from_pretrained(tiny)(TEXT, return_tensors="pt").input_ids[:, :32]
    with torch.no_grad():
        logp = judge(ids).logits[0].double().log_softmax(-1)
    expected = logp[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    assert np.abs(run.scores.logprob[:31] - expected).max() < 1e-4
    assert "with the PEFT adapter adapter" in run.manifest["notes"]


def test_another_adapter_is_another_model_and_one_that_is_not_there_is_refused(tiny: Path, tmp_path: Path) -> None:
    runs = [sm.ppl(str(tiny), text=TEXT, **ASKED)]
    for seed in (1, 2):
        adapter = make_adapter(tiny, tmp_path / f"adapter{seed}", seed)
        runs.append(sm.ppl(str(tiny), text=TEXT, adapter=str(adapter), **ASKED))
    assert len({run.manifest["model_fingerprint"] for run in runs}) == 3
    assert len({run.perplexity.value for run in runs}) == 3
    with pytest.raises(InputError, match=r"has no adapter_config\.json"):
        sm.open(str(tiny), adapter=str(tmp_path))
    with pytest.raises(InputError, match="is no home folder"):
        sm.open(str(tiny), adapter="~nobody-of-that-name/x")
    (adapter / "adapter_config.json").write_text('{"peft_type": "XLORA", "adapters": {"1": "/elsewhere"}}')
    with pytest.raises(InputError, match="it names other adapters, by their paths"):
        sm.ppl(str(tiny), text=TEXT, adapter=str(adapter), **ASKED)


# ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_what_is_waited_for_is_always_said(tiny: Path) -> None:
    phases = Phases()
    sm.ppl(str(tiny), text=TEXT, progress=phases, **ASKED)
    assert phases.words == [
        "reading and tokenizing the text",
        f"loading {tiny} with transformers",
        "scoring",
        "computing statistics and saving",
    ]
    assert phases.done > 0


def test_what_is_not_a_reference_is_no_baseline(tmp_path: Path) -> None:
    sm.ppl("table:uniform", text="one text", out=tmp_path / "run")
    with sm.open("table:uniform") as model:
        with pytest.raises(InputError, match="a run without hidden states"):
            model.compare(tmp_path / "run")
        with pytest.raises(InputError, match="not a reference"):
            model.compare(tmp_path / "nowhere")
