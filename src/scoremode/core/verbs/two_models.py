"""Two models that must run at the same time: may they, and do both fit into memory? Known before either is loaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from scoremode.core import extensions
from scoremode.core.cache.units import size_words
from scoremode.core.engine.plugin import EnginePlugin, Work
from scoremode.core.engine.registry import require
from scoremode.core.free_memory import available
from scoremode.core.verbs.arguments import asked_path
from scoremode.core.verbs.compared_models import name_of
from scoremode.core.verbs.model import LazyModel
from scoremode.errors import EngineError, print_line


def is_by_logits(baseline: EnginePlugin) -> bool:
    """Is a baseline of this engine compared by its logits, because it has no hidden states with a head?"""
    able = baseline.able()
    return able.logits and not able.hidden_states


def require_by_logits(baseline: LazyModel, candidate: LazyModel, question: Mapping[str, Any]) -> None:
    """Refuses a candidate that cannot run beside a baseline which has logits and no hidden states."""
    require(candidate.plugin, "divergence", "be compared")
    if not candidate.plugin.able().distributions:
        raise EngineError(
            f"the {candidate.engine_name} engine is compared by hidden states, and {baseline.engine_name} gives none",
            fix="use an unquantized checkpoint as the baseline",
        )
    path = asked_path(question)
    if path is not None and path.sequences > 1 and not candidate.plugin.able().logits:
        raise EngineError(
            f"a baseline of the {baseline.engine_name} engine takes every step beside its candidate, and the "
            f"{candidate.engine_name} engine decodes a whole batch before its scores are computed",
            fix="give --sequences 1, or use the checkpoint as the baseline",
        )
    if baseline.spread is not None or candidate.spread is not None:
        raise EngineError(
            f"a baseline of the {baseline.engine_name} engine runs in this process, beside one candidate without "
            "replicas",
            fix=f"leave --replicas out, or {_other_way()}",
        )


def require_both_fit(baseline: LazyModel, candidate: LazyModel, longest: int) -> None:
    """Prints about how much memory both models need, and refuses if it does not fit; loads neither.

    A model that is open already has its memory, and is not counted again.
    """
    if baseline.is_open and candidate.is_open:
        return
    work = Work(longest)
    sides = [(its, its.plugin.memory_need(its.subject, its.chosen.options, work)) for its in (baseline, candidate)]
    each = ", ".join(f"{size_words(need.size)} for {name_of(its)}{need.where}" for its, need in sides)
    both = size_words(sum(need.size for _, need in sides))
    print_line(f"scoremode: both models run at the same time and need about {both} of memory ({each})")
    for on_gpu, free in ((False, available), (True, _free_on_gpus)):
        needed = sum(need.size for its, need in sides if need.on_gpu is on_gpu and not its.is_open)
        left = free() if needed else None
        if left is not None and needed > left:
            device = "the GPU" if on_gpu else "this machine"
            raise EngineError(
                f"about {size_words(needed)} of memory must be free for both models at once, and {device} has "
                f"{size_words(left)} left",
                fix=_other_way(),
            )


def _other_way() -> str:
    files = extensions.offered("reference-output")
    return str(files[0].instead_of_states) if files else "use an unquantized checkpoint as the baseline"


def _free_on_gpus() -> int | None:
    """The free bytes of all GPUs that torch sees; None if it sees none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return sum(int(torch.cuda.mem_get_info(index)[0]) for index in range(torch.cuda.device_count()))
