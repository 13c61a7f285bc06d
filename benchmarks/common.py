"""Shared by benchmarks: windows, child processes, the plugin of an uninstalled checkout, models.

Imports nothing heavy at the top: vLLM's workers load this module too, for ``WorkerProbe``.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scoremode.core.engine.base import Engine, Wanted
    from scoremode.core.scores.answers import Answers, WindowList

HERE = Path(__file__).resolve().parent
SRC = HERE.parent / "src"
VERSION = "0.1.0"
GROUP, NAME, POINT = "vllm.general_plugins", "scoremode", "scoremode.engines.vllm.plugin:register"
ROUTES_GROUP, ROUTES_POINT = "vllm.endpoint_plugins", "scoremode.remote.service.endpoint:ScoreEndpoint"
PROBE = "common.WorkerProbe"
SMALL_VOCABULARY = 5003  # not a multiple of 64: vLLM pads it, and the padding must get no probability


# ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def own_windows(prompts: Iterable[Any]) -> WindowList:
    """Windows in which every token but the first is scored, one for each array of ids."""
    import numpy as np

    from scoremode.core.scores.answers import Window, WindowList

    arrays = (np.asarray(ids, np.int32) for ids in prompts)
    return WindowList(tuple(Window(ids, np.arange(len(ids) - 1, dtype=np.int32), ids[1:, None]) for ids in arrays))


def score_all(engine: Engine, windows: WindowList, want: Wanted | None = None) -> list[Answers]:
    """The answers of all windows, in their order."""
    import numpy as np

    from scoremode.core.engine.base import SCORES

    found = dict(engine.score(windows, np.zeros(len(windows), np.bool_), want or SCORES))
    return [found[i] for i in range(len(windows))]


def peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ── children ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def plugin_is_installed() -> bool:
    return all(any(point.name == NAME for point in entry_points(group=group)) for group in (GROUP, ROUTES_GROUP))


def child_environment(**changes: str) -> dict[str, str]:
    """An environment for child processes in which vLLM finds the plugin and ``common`` without an installation."""
    path = [str(HERE)]
    if not plugin_is_installed():
        path += [_dist_info(), str(SRC)]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    fixed = {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "SCOREMODE_VLLM_LOG": "-",  # the child's output already goes to a file
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    defaults = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return defaults | dict(os.environ) | fixed | changes


def temporary_folder(name: str) -> Path:
    """A folder that is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"scoremode-{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _dist_info(cache: dict[str, str] = {}) -> str:  # noqa: B006  # one folder per process
    if "folder" not in cache:
        folder = temporary_folder("plugin")
        info = folder / f"{NAME}-{VERSION}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n", encoding="utf-8")
        points = f"[{GROUP}]\n{NAME} = {POINT}\n[{ROUTES_GROUP}]\n{NAME} = {ROUTES_POINT}\n"
        (info / "entry_points.txt").write_text(points, encoding="utf-8")
        cache["folder"] = str(folder)
    return cache["folder"]


def run_child(command: list[str], environment: dict[str, str], log: Path, timeout: float) -> str | None:
    """Run a process, with its output in a file; return None if it succeeded, otherwise the reason in one line."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = child.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # its own session
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if code == 0:
        return None
    return f"no end after {timeout:.0f} s" if code is None else f"exit code {code}: {last_error(log)}"


def child_result(command: list[str], folder: Path, timeout: float, **changes: str) -> tuple[Any, str]:
    """Run a script that writes JSON into the file after ``--result``: what it wrote, or None and why there is nothing.

    What it printed is kept in ``folder``.
    """
    result, log = folder / "result.json", folder / "log.txt"
    result.unlink(missing_ok=True)
    why = run_child([*command, "--result", str(result)], child_environment(**changes), log, timeout)
    if result.exists():
        return json.loads(result.read_text(encoding="utf-8")), ""
    return None, why or "no result"


def variant_result(label: str, command: list[str], work: Path, arguments: Any, **changes: str) -> dict[str, Any]:
    """What a variant writes in a process of its own; of one that fails, an "error" and the end of its log."""
    begin = time.perf_counter()
    result, why = child_result(command, work, arguments.timeout, **changes)
    say(f"{label}: {time.perf_counter() - begin:.0f} s in all")
    if result is not None:
        return dict(result)
    say(f"{label} FAILED: {why}\n{last_lines(work / 'log.txt', 15)}")
    return {"error": why}


def parsed_with_child(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """Parses a benchmark's words, and those that it gives to its own children: see ``child_result``."""
    for hidden in ("--child", "--folder", "--result"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    arguments.words = sys.argv[1:] if words is None else list(words)
    return arguments


def last_lines(log: Path, count: int) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


def last_error(log: Path) -> str:
    """The line of a log that best explains the failure."""
    lines = [" ".join(line.split()) for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    empty = ("Engine core initialization failed", "EngineDeadError", "See root cause", "EngineCore encountered")
    telling = [x for x in lines if ("Error" in x or "error:" in x) and not any(words in x for words in empty)]
    return (telling or [*lines, ""])[-1][-300:]


def say(*words: object) -> None:
    """Print progress immediately, to standard error, so that it does not mix with JSON."""
    print(*words, file=sys.stderr, flush=True)


# ── inside vLLM's worker ─────────────────────────────────────────────────────────────────────────────────────────────
class WorkerProbe:
    """A ``worker_extension_cls``: the memory of scoring, and the rows of each forward pass.

    The meter says what the scoring call itself allocates, and the peak of whole steps. It wraps the one function that
    scores (our pooler, or the prompt log-probabilities of either of vLLM's runners), so that a scoring call is measured
    even if the peak of the layers before it is higher.

    The witness says how many rows each forward pass gives to the pooler. That vLLM accepted a setting does not prove
    that prompts were split; this does.
    """

    def scoremode_meter_begin(self) -> bool:
        import torch

        if not torch.cuda.is_available():
            return False
        torch.cuda.synchronize()
        self.scoremode_meter: dict[str, float] = {"idle": torch.cuda.memory_allocated(), "scoring": 0, "peak": 0}
        for owner, name in _scoring_calls(self.model_runner):  # type: ignore[attr-defined]
            if not hasattr(getattr(owner, name), "metered"):
                setattr(owner, name, _metered(getattr(owner, name), self.scoremode_meter))
        torch.cuda.reset_peak_memory_stats()
        return True

    def scoremode_meter_end(self) -> dict[str, float]:
        import torch

        torch.cuda.synchronize()
        meter = self.scoremode_meter
        peak = max(meter["peak"], torch.cuda.max_memory_allocated())
        return {"scoring_mib": meter["scoring"] / 2**20, "step_mib": (peak - meter["idle"]) / 2**20}

    def scoremode_witness_begin(self) -> None:
        pooler = self.model_runner.get_model().pooler  # type: ignore[attr-defined]
        self.scoremode_passes: list[int] = []
        passes, forward = self.scoremode_passes, pooler.forward

        def witnessed(hidden_states: Any, *rest: Any, **named: Any) -> Any:
            passes.append(len(hidden_states))
            return forward(hidden_states, *rest, **named)

        pooler.forward = witnessed

    def scoremode_witness_end(self) -> list[int]:
        return self.scoremode_passes


def _scoring_calls(runner: Any) -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = []
    pooler = getattr(runner.get_model(), "pooler", None)
    if pooler is not None:
        found.append((pooler, "forward"))
    if hasattr(runner, "_get_prompt_logprobs_dict"):
        found.append((runner, "_get_prompt_logprobs_dict"))
    worker = getattr(runner, "prompt_logprobs_worker", None)
    if worker is not None:
        found.append((worker, "compute_prompt_logprobs"))
    return found


def _metered(call: Callable[..., Any], meter: dict[str, float]) -> Callable[..., Any]:
    import torch

    def measured(*arguments: Any, **named: Any) -> Any:
        meter["peak"] = max(meter["peak"], torch.cuda.max_memory_allocated())
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        try:
            return call(*arguments, **named)
        finally:
            highest = torch.cuda.max_memory_allocated()
            meter["scoring"] = max(meter["scoring"], highest - before)
            meter["peak"] = max(meter["peak"], highest)

    measured.metered = True  # type: ignore[attr-defined]
    return measured


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def llama_shape(sizes: Sequence[int], *, tied: bool = False, length: int = 8192) -> dict[str, Any]:
    """A Llama's configuration from width, width of the MLP, layers, heads, heads of keys and values, vocabulary."""
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    shape = dict(zip((*names, "vocab_size"), sizes, strict=True))
    return {**shape, "max_position_embeddings": length, "tie_word_embeddings": tied}


def make_small_llama(folder: Path) -> Path:
    """Random weights, 4 heads of 64, peaked predictions, the same at every call."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    shape = llama_shape((256, 512, 2, 4, 2, SMALL_VOCABULARY), length=4096)
    config = LlamaConfig(**shape, head_dim=64, bos_token_id=1, eos_token_id=2)
    model: Any = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.25 if "lm_head" in name else 0.08)
    model.save_pretrained(folder)
    return folder
