"""Is score mode right on this machine? All checks in one script, one line each, each engine in its own process.

model      a checkpoint: exact head against Transformers, as-served head against vLLM's own prompt_logprobs=0
chunks     any max_num_batched_tokens, CUDA graphs, many prompts in flight, custom targets: the same numbers
decode     each token from its own decode step: against Transformers, against prefill, against vLLM's own logprobs
quantized  as served: W4A16, W8A16, W8A8, FP8, NVFP4A16 against prompt_logprobs=0 of the same checkpoint; FP8 KV cache
inert      ordinary generation is the same with and without the plugin

The head and its kernels are tests: ``pytest tests/head/fused_checks.py tests/head``.

    python benchmarks/gpu_checks.py [--model FOLDER] [--quantized FOLDER] [--groups kernel,model,…] [--jobs 4] [--small]

Without ``--model`` a small seeded Llama is made; without ``--quantized`` it is quantized by
``examples/make_checkpoints.py``. vLLM's own numbers and ours are requested one prompt at a time, so that both have
the same batches: then only the rounding of single logits differs. Every comparison is also made with the scores shifted
by one token, and must fail then.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from common import (
    HERE,
    PROBE,
    child_environment,
    last_lines,
    make_small_llama,
    own_windows,
    run_child,
    say,
    score_all,
    temporary_folder,
)

GROUPS = ("model", "chunks", "decode", "quantized", "inert")
QUANTIZED = ("w4a16", "w4a16-asym", "w8a16", "w8a8", "fp8", "nvfp4a16")
ON_CPU = ("w8a8",)
LENGTHS = (700, 511, 64, 1000, 2, 33, 257, 640)
SMALL_LENGTHS = (40, 33, 2)  # with --small
FREE_LENGTH, FREE_TARGETS = 150, 3  # a window with custom targets on every row, including the last
GENERATED = 24
FLOAT32_NATS = 2e-3  # float32 engines against Transformers: different kernels, ten times what was measured on a CPU
STEP_NATS = 1e-6  # the same logits of the same step; vLLM's softmax is in float32
SPLIT_NATS = 1e-3  # float32, a different split of the same prompts
SERVED_MEAN = 2e-3  # as-served against prompt_logprobs=0, mean; its maximum is two steps of bfloat16 at that logit
FP8_CACHE_MEAN = 0.5  # nats per target by which an FP8 KV cache may change scores: 0.30 for the seeded Llama

Arrays = dict[str, npt.NDArray[Any]]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Job:
    """What one child process computes."""

    name: str
    kind: str  # "ours", "decode", "stock", "reference", "checkpoints"
    model: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


# ── children: engines ────────────────────────────────────────────────────────────────────────────────────────────────
def windows_of(ids: list[list[int]], vocabulary: int) -> list[Any]:
    """One window per prompt that scores its own tokens, then one with custom targets."""
    from scoremode.core.scores.answers import Window

    fed = np.array(ids[0][:FREE_LENGTH], np.int32)
    chosen = np.random.default_rng(5).integers(0, vocabulary, (len(fed), FREE_TARGETS), dtype=np.int32)
    return [*own_windows(ids).items, Window(fed, np.arange(len(fed), dtype=np.int32), chosen)]


def together(answers: list[Any], prefix: str = "") -> Arrays:
    """Answers of the own-token windows, concatenated, and those of the last window separately."""
    names = ("logprob", "rank", "entropy", "top", "top_logprob")
    found = {prefix + n: np.concatenate([getattr(a, n).reshape(-1) for a in answers[:-1]]) for n in names}
    return found | {prefix + "free_" + n: getattr(answers[-1], n) for n in ("logprob", "rank")}


def child_ours(job: Job, ids: list[list[int]], vocabulary: int) -> Arrays:
    from scoremode.core.scores.answers import WindowList
    from scoremode.engines.vllm.engine import VllmEngine
    from scoremode.engines.vllm.support import LaunchArguments

    arguments = LaunchArguments.named({**job.options, "worker_extension_cls": PROBE})
    windows = windows_of(ids, vocabulary)
    with VllmEngine(job.model, arguments) as engine:
        engine.llm.collective_rpc("scoremode_witness_begin")
        alone = [score_all(engine, WindowList((w,)))[0] for w in windows]
        passes = np.array(engine.llm.collective_rpc("scoremode_witness_end")[0])
        at_once = score_all(engine, WindowList(tuple(windows)))
        facts = {"head": np.array(engine.facts.head), "passes": passes}
    return together(alone) | together(at_once, "flying_") | facts


def child_decode(job: Job, ids: list[list[int]], vocabulary: int) -> Arrays:
    """The scores of the decode path; with the head as served, also what vLLM says of the tokens that it sampled."""
    import vllm

    from scoremode.core.plan.path import DecodePath
    from scoremode.core.scores.answers import WindowList
    from scoremode.engines.vllm.decode import VllmDecodeEngine
    from scoremode.engines.vllm.support import LaunchArguments

    windows = windows_of(ids, vocabulary)
    arguments = LaunchArguments.named(job.options, path=DecodePath(len(windows)))
    with VllmDecodeEngine(job.model, arguments) as engine:
        core, said = engine.llm.llm_engine, dict[str, Any]()
        step = core.step

        def watched() -> Any:
            outputs = step()
            said.update({output.request_id: output.outputs[0].logprobs for output in outputs if output.finished})
            return outputs

        core.step = watched
        if job.options.get("head") == "as-served":
            vllm.SamplingParams = partial(vllm.SamplingParams, logprobs=0)
        found = together(score_all(engine, WindowList(tuple(windows))))
        found["runner"] = np.array(json.dumps(engine.facts.settings))
    if job.options.get("head") == "as-served":
        in_order = [said[name] for name in sorted(said, key=lambda name: int(name.rpartition("-")[2]))]
        # the last token of a text is not forced, so vLLM says nothing of it
        found["theirs"] = np.array([own[i][token].logprob for own, i, token in forced_tokens(in_order, windows)])
        kept = [np.arange(len(w.rows)) < len(w.rows) - 1 for w in windows[:-1]]
        found["forced"] = np.concatenate(kept)
    return found


def forced_tokens(said: list[Any], windows: list[Any]) -> Iterator[tuple[Any, int, int]]:
    """What vLLM said of a text, a step, and the token that was forced there; the windows with own tokens only."""
    for own, window in zip(said, windows[:-1], strict=False):
        for i, token in enumerate(window.ids[1:-1].tolist()):
            yield own, i, token


def child_stock(job: Job, ids: list[list[int]], vocabulary: int) -> Arrays:
    from vllm import LLM, SamplingParams

    llm = LLM(model=job.model, skip_tokenizer_init=True, enable_prefix_caching=False, **job.options)
    score = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=0)
    logprob, rank = [], []
    for row in ids:
        lines = llm.generate([{"prompt_token_ids": row}], score, use_tqdm=False)[0].prompt_logprobs
        logprob += [lines[i][row[i]].logprob for i in range(1, len(row))]
        rank += [lines[i][row[i]].rank for i in range(1, len(row))]
    more = SamplingParams(max_tokens=GENERATED, temperature=0.0, detokenize=False, ignore_eos=True)
    outputs = [llm.generate([{"prompt_token_ids": row}], more, use_tqdm=False)[0] for row in ids[:4]]
    written = [list(o.outputs[0].token_ids) for o in outputs]
    return {"logprob": np.array(logprob), "rank": np.array(rank), "written": np.array(written)}


def child_reference(job: Job, ids: list[list[int]], vocabulary: int) -> Arrays:
    """Transformers in float32 and bfloat16; the head in float64, applied to the hidden states."""
    import torch
    from transformers import AutoModelForCausalLM

    from scoremode.head.columns import Columns, define_columns, define_logits

    device = "cuda" if torch.cuda.is_available() else "cpu"
    windows = windows_of(ids, vocabulary)
    found: Arrays = {}
    for name, dtype in (("f32_", torch.float32), ("bf16_", torch.bfloat16)):
        model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).to(device).eval()
        weight, cap = model.get_output_embeddings().weight, getattr(model.config, "final_logit_softcapping", None)
        answers, largest = [], 0.0
        for w in windows:
            with torch.inference_mode():
                fed = torch.from_numpy(w.ids.astype(np.int64))[None].to(device)
                hidden = model.base_model(fed, use_cache=False).last_hidden_state[0]
                targets = torch.from_numpy(w.targets.astype(np.int64)).to(device)
                parts = []
                for i in range(0, len(targets), 64):
                    x = define_logits(hidden[w.rows[i : i + 64].tolist()], weight, softcap=cap)
                    largest = max(largest, float(x.abs().max()))
                    parts.append(define_columns(x, targets[i : i + 64]))
            columns = Columns.cat(parts)
            answers.append(Columns(*(getattr(columns, n).cpu().numpy() for n in Columns.__slots__)))
        found |= together(answers, name) | {name + "largest": np.array(largest)}
    return found


def child_checkpoints(job: Job, ids: list[list[int]], vocabulary: int) -> Arrays:
    """Round-to-nearest checkpoints of the model, by the script that ships."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    make: Callable[..., Any] = __import__("make_checkpoints").make
    made = []
    for name in job.options["names"]:
        try:
            make(job.model, Path(job.options["folder"]) / name, name)
            made.append(name)
        except Exception:  # the check of that checkpoint says that it is missing
            traceback.print_exc()
    return {"made": np.array(made)}


CHILDREN: dict[str, Callable[[Job, list[list[int]], int], Arrays]] = {
    "ours": child_ours,
    "decode": child_decode,
    "stock": child_stock,
    "reference": child_reference,
    "checkpoints": child_checkpoints,
}


# ── the parent: jobs ─────────────────────────────────────────────────────────────────────────────────────────────────
class Lab:
    """Runs jobs, keeps their results, prints one line per check."""

    def __init__(self, work: Path, ids: list[list[int]], vocabulary: int, on_gpu: bool, timeout: float) -> None:
        self.work, self.ids, self.on_gpu, self.timeout = work, ids, on_gpu, timeout
        self.results: dict[str, Arrays] = {}
        self.failures: dict[str, str] = {}
        self.lines: list[tuple[str, bool]] = []
        (work / "ids.json").write_text(json.dumps({"ids": ids, "vocabulary": vocabulary}), encoding="utf-8")

    def run(self, jobs: list[Job], at_once: int) -> None:
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(self._run, jobs))

    def _run(self, job: Job) -> None:
        begin = time.perf_counter()
        spec, out, log = (self.work / f"{job.name}.{end}" for end in ("json", "npz", "log"))
        out.unlink(missing_ok=True)  # left by an earlier run in the same folder
        spec.write_text(json.dumps(asdict(job)), encoding="utf-8")
        environment = child_environment(**job.environment)
        command = [__file__, "--child", str(spec)]
        why = run_child(command, environment, log, self.timeout)
        if why is not None and "ddress already in use" in log.read_text(encoding="utf-8", errors="replace"):
            why = run_child(command, environment, log, self.timeout)  # two engines picked the same port
        if not out.exists():
            self.failures[job.name] = why or "no result"
            say(f"… {job.name}: failed after {time.perf_counter() - begin:.0f} s: {why}")
            say(last_lines(log, 6))
            return
        with np.load(out) as stored:
            self.results[job.name] = dict(stored)
        say(f"… {job.name}: {time.perf_counter() - begin:.0f} s")

    def get(self, job: str, name: str) -> Any:
        if job not in self.results:
            raise RuntimeError(f"{job}: {self.failures.get(job, 'was not run')}")
        return self.results[job][name]

    def check(self, name: str, judge: Callable[[], tuple[bool, str]]) -> None:
        try:
            good, figure = judge()
        except Exception as error:
            good, figure = False, " ".join(f"{type(error).__name__}: {error}".split())[:400]
        self.lines.append((name, good))
        print(f"{'PASS' if good else 'FAIL'}  {name}: {figure}", flush=True)


def engine_options(lab: Lab, **changes: Any) -> dict[str, Any]:
    fixed: dict[str, Any] = {"max_model_len": 1024 + GENERATED + 16, "enforce_eager": True, "dtype": "bfloat16"}
    fixed["max_num_batched_tokens"] = 2048
    if lab.on_gpu:
        # a fixed cache size: measuring free memory fails with other engines on the same GPU
        fixed |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30}
    return fixed | changes


SAME_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # the runner that supports pooling in 0.24: the same batches for both


def jobs_of(lab: Lab, groups: list[str], model: str) -> list[Job]:
    """All jobs except those on quantized checkpoints; slow ones first."""

    def ours(name: str, environment: dict[str, str] | None = None, **changes: Any) -> Job:
        return Job(name, "ours", model, engine_options(lab, **changes), environment or {})

    def decode(name: str, environment: dict[str, str] | None = None, **changes: Any) -> Job:
        options = engine_options(lab, enforce_eager=not lab.on_gpu, **changes)
        return Job(name, "decode", model, options, environment or {})

    stock = Job("stock", "stock", model, engine_options(lab), SAME_RUNNER)
    without = Job("stock-no-plugin", "stock", model, engine_options(lab), {**SAME_RUNNER, "VLLM_PLUGINS": ""})
    # otherwise vLLM's attention multiplies float32 as TF32; compiled kernels of both kinds must not share a cache
    ieee = {"TRITON_F32_DEFAULT": "ieee", "TRITON_CACHE_DIR": str(lab.work / "triton-ieee")}
    whole = ours("f32-2048", ieee, dtype="float32")
    exact, served = ours("exact"), ours("served", head="as-served")
    wanted = {
        "model": [exact, served, whole, stock, Job("reference", "reference", model)],
        "chunks": [
            *([ours("graphs", enforce_eager=False)] if lab.on_gpu else []),
            *(ours(f"f32-{n}", ieee, dtype="float32", max_num_batched_tokens=n, max_num_seqs=32) for n in (64, 256)),
            whole,
            exact,
            Job("reference", "reference", model),
        ],
        "decode": [
            exact,
            decode("decode"),
            decode("decode-served", head="as-served"),
            decode("decode-f32", ieee, dtype="float32"),
            Job("reference", "reference", model),
        ],
        "quantized": [exact, *([ours("kv-fp8", kv_cache_dtype="fp8")] if lab.on_gpu else [])],
        "inert": [stock, without],
    }
    order = ("chunks", "model", "decode", "quantized", "inert")
    return list({job.name: job for group in order if group in groups for job in wanted[group]}.values())


def quantized_jobs(lab: Lab, folder: Path, names: list[str]) -> list[Job]:
    jobs = []
    for name in names:
        model = str(folder / name)
        jobs.append(Job(f"served-{name}", "ours", model, engine_options(lab, head="as-served")))
        jobs.append(Job(f"stock-{name}", "stock", model, engine_options(lab), SAME_RUNNER))
    return jobs


# ── the parent: checks ───────────────────────────────────────────────────────────────────────────────────────────────
def difference(a: Floats, b: Floats) -> Floats:
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {a.shape} and {b.shape}")
    apart: Floats = np.abs(a - b)
    return apart


def close(a: Floats, b: Floats, mean: float, largest: float) -> tuple[bool, str]:
    """Within both tolerances, while the same scores shifted by one target are far outside."""
    apart, shifted = difference(a, b), difference(np.roll(a, 1, axis=0), b)
    good = bool(apart.mean() <= mean and apart.max() <= largest)
    control = bool(shifted.mean() > 10 * mean and shifted.max() > largest)
    figure = f"mean {apart.mean():.2e} (≤ {mean:.2g}), max {apart.max():.2e} (≤ {largest:.2g}) nats"
    noticed = f"shifted by one: mean {shifted.mean():.3g}{'' if control else ' NOT NOTICED'}"
    return good and control, f"{figure}, {apart.size} targets; {noticed}"


def bf16_noise(lab: Lab) -> tuple[float, float]:
    """(mean, max) by which another bfloat16 implementation may differ: twice what bfloat16 differs from float32."""
    apart = difference(lab.get("reference", "bf16_logprob"), lab.get("reference", "f32_logprob"))
    return 2 * float(apart.mean()) + 1e-3, 4 * float(apart.max()) + 1e-2


def bf16_step(lab: Lab) -> float:
    """Two steps of bfloat16 at the largest logit."""
    return float(2 * 2.0 ** (np.floor(np.log2(float(lab.get("reference", "f32_largest")))) - 7))


def perplexity(logprob: Floats) -> float:
    return float(np.exp(-logprob.mean()))


def check_model(lab: Lab) -> None:
    get = lab.get

    def heads() -> tuple[bool, str]:
        said = str(get("exact", "head")), str(get("served", "head"))
        return said == ("exact-fp32", "as-served"), " and ".join(said)

    def float32(column: str, prefix: str = "") -> tuple[bool, str]:
        a, b = get("f32-2048", prefix + column), get("reference", "f32_" + prefix + column)
        return close(a, b, FLOAT32_NATS / 10, FLOAT32_NATS)

    def ranks() -> tuple[bool, str]:
        same = float((get("f32-2048", "rank") == get("reference", "f32_rank")).mean())
        tops = float((get("f32-2048", "top") == get("reference", "f32_top")).mean())
        return same > 0.97 and tops > 0.99, f"{same:.4f} of ranks (> 0.97), {tops:.4f} of tops (> 0.99) are the same"

    def as_served() -> tuple[bool, str]:
        return close(get("served", "logprob"), get("stock", "logprob"), SERVED_MEAN, bf16_step(lab))

    def first_choices() -> tuple[bool, str]:
        chosen = get("served", "rank")[get("stock", "rank") == 1]
        share = float((chosen == 1).mean()) if len(chosen) else 0.0
        figure = f"{share:.4f} (> 0.97) of {len(chosen)} targets (≥ 50) that vLLM ranks first"
        return share > 0.97 and len(chosen) >= 50, figure

    def rounding() -> tuple[bool, str]:
        apart = difference(get("exact", "logprob"), get("served", "logprob"))
        return 0 < apart.mean() < 0.05, f"mean {apart.mean():.2e} (< 0.05, > 0), max {apart.max():.2e} nats"

    lab.check("which head is said", heads)
    lab.check("float32 against Transformers, logprob", lambda: float32("logprob"))
    lab.check("float32 against Transformers, entropy", lambda: float32("entropy"))
    lab.check("float32 against Transformers, top_logprob", lambda: float32("top_logprob"))
    lab.check("float32 against Transformers, rank and top", ranks)
    lab.check("custom targets, including the last row, float32", lambda: float32("logprob", "free_"))
    lab.check(
        "bfloat16, exact head, against Transformers bfloat16 with a float64 head",
        lambda: close(get("exact", "logprob"), get("reference", "bf16_logprob"), *bf16_noise(lab)),
    )
    lab.check("bfloat16, as served, against prompt_logprobs=0", as_served)
    lab.check("bfloat16, as served, first choices", first_choices)
    lab.check("what rounding logits to bfloat16 moves", rounding)


def check_chunks(lab: Lab) -> None:
    get = lab.get
    whole = partial(get, "f32-2048")

    def cut(n: int) -> tuple[bool, str]:
        passes = get(f"f32-{n}", "passes")
        # the last token of a window is only a target and is not fed, except in the window with custom targets
        free = min(FREE_LENGTH, len(lab.ids[0]))
        wanted = sum(-(-fed // n) for fed in (*(len(ids) - 1 for ids in lab.ids), free))
        figure = f"{len(passes)} passes ({wanted}), of {passes.max()} rows at most (≤ {n})"
        return len(passes) == wanted and int(passes.max()) <= n, figure

    for n in (64, 256, 2048):
        lab.check(f"prompts are really cut into chunks of {n}, as the worker sees them", partial(cut, n))
    for n in (64, 256):
        for column in ("logprob", "entropy", "free_logprob"):
            lab.check(
                f"chunks of {n} tokens, float32, {column}",
                lambda n=n, c=column: close(get(f"f32-{n}", c), whole(c), SPLIT_NATS / 10, SPLIT_NATS),  # type: ignore[misc]
            )
    for job in ("f32-64", "f32-256", "f32-2048"):
        lab.check(
            f"many prompts in flight, {job}",
            lambda j=job: close(get(j, "flying_logprob"), whole("logprob"), SPLIT_NATS / 10, SPLIT_NATS),  # type: ignore[misc]
        )
    if lab.on_gpu:
        lab.check(
            "CUDA graphs and compilation against eager, bfloat16",
            lambda: close(get("graphs", "logprob"), get("exact", "logprob"), *bf16_noise(lab)),
        )


def check_decode(lab: Lab) -> None:
    get = lab.get

    def float32(column: str) -> tuple[bool, str]:
        return close(get("decode-f32", column), get("reference", "f32_" + column), FLOAT32_NATS / 10, FLOAT32_NATS)

    def same_step() -> tuple[bool, str]:
        ours = get("decode-served", "logprob")[get("decode-served", "forced")]
        return close(ours, get("decode-served", "theirs"), STEP_NATS, 4 * STEP_NATS)

    for column in ("logprob", "entropy", "free_logprob"):
        lab.check(f"decode path, float32, against Transformers, {column}", partial(float32, column))
    lab.check(
        "decode path against prefill, bfloat16",
        lambda: close(get("decode", "logprob"), get("exact", "logprob"), *bf16_noise(lab)),
    )
    lab.check("decode path as served, against vLLM's own logprobs of the same steps", same_step)
    if "decode" in lab.results:
        print(f"      settings of the decode path: {get('decode', 'runner')}")


def check_quantized(lab: Lab, names: list[str]) -> None:
    get = lab.get

    def as_served(name: str) -> tuple[bool, str]:
        ours, theirs = get(f"served-{name}", "logprob"), get(f"stock-{name}", "logprob")
        step = bf16_step(lab) if "reference" in lab.results else 0.25
        good, figure = close(ours, theirs, SERVED_MEAN, step)
        plain = perplexity(get("exact", "logprob"))
        return good, f"{figure}; perplexity {perplexity(ours):.4f}, of bfloat16 {plain:.4f}"

    def cache() -> tuple[bool, str]:
        a, b = get("kv-fp8", "logprob"), get("exact", "logprob")
        apart, shifted = difference(a, b).mean(), difference(np.roll(a, 1), b).mean()
        good = bool(np.isfinite(a).all() and 0 < apart <= FP8_CACHE_MEAN and shifted > 5 * apart)
        figure = f"mean {apart:.2e} (≤ {FP8_CACHE_MEAN}, > 0) nats; shifted by one: {shifted:.3g}"
        return good, f"{figure}; perplexity {perplexity(a):.4f}, of bfloat16 {perplexity(b):.4f}"

    for name in names:
        lab.check(f"{name}, as served, against prompt_logprobs=0", partial(as_served, name))
    if lab.on_gpu:
        lab.check("kv_cache_dtype=fp8 against bfloat16", cache)


def check_inert(lab: Lab) -> None:
    def same() -> tuple[bool, str]:
        a, b = lab.get("stock", "written"), lab.get("stock-no-plugin", "written")
        apart = difference(lab.get("stock", "logprob"), lab.get("stock-no-plugin", "logprob")).max()
        return bool(np.array_equal(a, b) and apart < 1e-3), (
            f"{int((a != b).sum())} of {a.size} tokens differ (0), prompt_logprobs by {apart:.2g} nats (< 0.001)"
        )

    lab.check("generate with the plugin installed as without", same)


# ── main ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def prompts_of(model: Path, lengths: tuple[int, ...]) -> tuple[list[list[int]], int]:
    """Prompts of text if the model has a tokenizer, otherwise samples of the model; and the vocabulary."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    vocabulary = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    if (model / "tokenizer.json").exists():
        from pydoc_data.topics import topics

        from transformers import AutoTokenizer

        text = "\n\n".join(topics[name] for name in sorted(topics))[:60_000]
        stream = list(AutoTokenizer.from_pretrained(str(model))(text, add_special_tokens=False).input_ids)
    else:
        return babble(model, vocabulary, lengths), vocabulary
    ends = np.cumsum(lengths).tolist()
    return [[int(i) for i in stream[end - n : end]] for end, n in zip(ends, lengths, strict=True)], vocabulary


def babble(model: Path, vocabulary: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Samples of the model, seeded: random ids would be so unlikely that none would rank first."""
    import torch
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
    torch.manual_seed(3)
    first = torch.randint(3, vocabulary, (len(lengths), 1))
    with torch.inference_mode():
        said = network.generate(
            first,
            attention_mask=torch.ones_like(first),
            do_sample=True,
            top_k=0,
            max_new_tokens=max(lengths) - 1,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [row[:n].tolist() for row, n in zip(said, lengths, strict=True)]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; default: make a small seeded Llama")
    parser.add_argument("--quantized", type=Path, help=f"a folder of checkpoints named {', '.join(QUANTIZED)}")
    parser.add_argument("--names", help="of quantized checkpoints to check; all by default")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--jobs", type=int, default=0, help="engines at once; 0: 4 on a GPU, 1 on a CPU")
    parser.add_argument("--timeout", type=float, default=180, help="seconds an engine may take")
    parser.add_argument("--keep", type=Path, help="keep results and logs in this folder")
    parser.add_argument("--small", action="store_true", help="short prompts: does it run at all?")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.child:
        return child(arguments.child)
    begin = time.perf_counter()
    lab, model = prepare(arguments)
    groups = arguments.groups.split(",")
    names = arguments.names.split(",") if arguments.names else list(QUANTIZED if lab.on_gpu else ON_CPU)
    at_once = arguments.jobs or (4 if lab.on_gpu else 1)
    folder = arguments.quantized or lab.work / "quantized"
    jobs = jobs_of(lab, groups, str(model))
    if "quantized" in groups:
        if arguments.quantized is None:
            made = Job("checkpoints", "checkpoints", str(model), {"folder": str(folder), "names": names})
            lab.run([made], 1)
        jobs += quantized_jobs(lab, folder, names)
    say(f"{len(jobs)} processes, {at_once} at once")
    lab.run(jobs, at_once)
    checks: dict[str, Callable[[], None]] = {
        "model": lambda: check_model(lab),
        "chunks": lambda: check_chunks(lab),
        "decode": lambda: check_decode(lab),
        "quantized": lambda: check_quantized(lab, names),
        "inert": lambda: check_inert(lab),
    }
    for group in groups:
        print(f"── {group}", flush=True)
        checks[group]()
    failed = [name for name, good in lab.lines if not good]
    print(f"{len(lab.lines) - len(failed)} of {len(lab.lines)} checks passed in {time.perf_counter() - begin:.0f} s")
    for name in failed:
        print(f"FAILED: {name}")
    return int(bool(failed))


def prepare(arguments: argparse.Namespace) -> tuple[Lab, Path]:
    import torch

    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    work = (arguments.keep or temporary_folder("checks")).resolve()
    model = (arguments.model or make_small_llama(work / "small-llama")).resolve()
    ids, vocabulary = prompts_of(model, SMALL_LENGTHS if arguments.small else LENGTHS)
    return Lab(work, ids, vocabulary, torch.cuda.is_available(), arguments.timeout), model


def child(spec: Path) -> int:
    job = Job(**json.loads(spec.read_text(encoding="utf-8")))
    asked = json.loads((spec.parent / "ids.json").read_text(encoding="utf-8"))
    found = CHILDREN[job.kind](job, asked["ids"], asked["vocabulary"])
    np.savez(spec.with_suffix(".part.npz"), **found)  # type: ignore[arg-type]
    spec.with_suffix(".part.npz").rename(spec.with_suffix(".npz"))  # whole, or not there
    return 0


if __name__ == "__main__":
    sys.exit(main())
