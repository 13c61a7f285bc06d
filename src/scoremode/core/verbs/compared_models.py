"""The models of a comparison: which engine scores which model, where the runs go, and both runs as one value."""

from __future__ import annotations

import glob
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.core.arguments import user_path
from scoremode.core.cache.units import size_words
from scoremode.core.disk.folders import MANIFEST, REFERENCE
from scoremode.core.disk.stores import is_there
from scoremode.core.disk.uri import is_uri, may_be_stored, name_in
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import engine_for, require, share_options
from scoremode.core.extensions import BaselineOffer, FormatOffer, offered
from scoremode.core.free_memory import available
from scoremode.core.models.gguf import SPLIT, SUFFIX, gguf_models
from scoremode.core.models.names import reader_of
from scoremode.core.scores.columns import Divergences
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.statistics.equivalence import answer_targets
from scoremode.core.store import runs
from scoremode.core.store.run import Run
from scoremode.core.verbs.model import LazyModel
from scoremode.core.verbs.place import Place
from scoremode.errors import EngineError, InputError, print_line

logger = logging.getLogger(__name__)

SIGNS, PROJECTOR = "*?[", "mmproj"
KEPT = ("bits_per_weight", "model_format", "sizes", "engine", "rerun", "promise", "command")
"""Fields of a manifest that a Comparison has too."""
NOISE = ("noise_kl", "noise_perturbed")  # of a manifest


# ── engines ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class CompareRequest:
    """The engines and options that a user gave for the candidates and for the baseline."""

    engine: str | None
    options: Mapping[str, Any]
    baseline_engine: str | None  # None: that of the candidates
    baseline_options: Mapping[str, Any] | None  # in addition to those of the candidates, or instead of them
    tokenizer: str | None
    keep: bool = False  # files that are fetched for candidates

    @property
    def of_baseline(self) -> Mapping[str, Any]:
        """The arguments that were given for the baseline alone, by name."""
        given = {"engine": self.baseline_engine, **(self.baseline_options or {})}
        return {f"baseline_{name}": value for name, value in given.items() if value is not None}


def is_stored(baseline: str) -> bool:
    """Is this a baseline that is stored, and not a model: a run, a reference, or a kind that a wing offers?"""
    own = runs.is_run(baseline) or is_there(baseline, REFERENCE)
    return own or any(kind.claims(baseline) for kind in offered(BaselineOffer))


def assign_engines(
    baseline: str, candidates: Sequence[str], wanted: CompareRequest, *, divergence: bool = True
) -> tuple[LazyModel | None, dict[str, LazyModel]]:
    """Chooses engines and options for the baseline (None if it is not scored) and for each candidate that is a model.

    A candidate whose engine cannot measure a divergence is refused here, before the baseline is scored; without
    ``divergence``, every engine is allowed. Nothing is read of a model yet.
    """
    scored = [name for name in candidates if not runs.is_run(name)]
    for name in filter(is_stored, scored):
        raise InputError(f"{name} can only be the baseline", fix="give it first")
    requests = [(name, wanted.engine, wanted.options) for name in scored]
    is_model = not is_stored(baseline)
    if is_model:
        options = {**wanted.options, **(wanted.baseline_options or {})}
        requests.insert(0, (baseline, wanted.baseline_engine or wanted.engine, options))
    plugins = [engine_for(engine, name) for name, engine, _ in requests]
    models = [
        LazyModel(name, plugin, share_options(plugin, plugins, options), wanted.tokenizer)
        for (name, _, options), plugin in zip(requests, plugins, strict=True)
    ]
    first = models.pop(0) if is_model else None
    for model in models if divergence else ():
        require(model.plugin, "divergence", "be compared with a baseline")
    return first, {model.name: model for model in models}


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def expand_candidates(given: Sequence[str | os.PathLike[str]], baseline: str = "") -> list[str]:
    """The candidates by name, in the order given; those of a pattern or a folder are sorted by name.

    quants/*.gguf    every model that matches; a shell may have expanded the pattern already
    quants/          the models and runs in a folder, if the folder is not a model or a run itself

    A split GGUF file is one model, named by its first part. Projectors of images (mmproj…) are left out, with a line. A
    pattern of the hub does not name the baseline.
    """
    typed = [os.fspath(name) for name in given]
    if len(set(typed)) < len(typed):
        raise InputError("two candidates have the same name", fix="give each of them once")
    found: dict[str, str] = {}
    for name in (name for one in typed for name in _expanded(one, baseline)):
        if Path(name).name.startswith(PROJECTOR) and name.endswith(SUFFIX):
            logger.warning("%s is left out: it is a projector of images, not a model", name)
            continue
        split = SPLIT.match(name)
        found.setdefault(name if split is None else f"{split[1]}-of-{split[3]}", name)
    return list(found.values())


def _expanded(name: str, baseline: str) -> list[str]:
    path, reader = user_path(name), reader_of(name)
    if reader is not None:
        return reader.expand(name, baseline)
    if is_uri(name) or path.is_file():
        return [name]
    if path.is_dir():
        inside = () if _is_candidate(path) else (*gguf_models(path), *filter(_is_candidate, path.iterdir()))
        # the folder itself if there are none, so that the engine says what is wrong
        return sorted(str(Path(name) / one.name) for one in inside) or [name]
    if not any(sign in name for sign in SIGNS):
        return [name]
    matching = sorted(glob.glob(str(path)))
    models = [one for one in matching if one.endswith(SUFFIX) or _is_candidate(Path(one))]
    if models and (left_out := len(matching) - len(models)):
        logger.warning("%d of the files that match %s are left out: they are neither models nor runs", left_out, name)
    if not models:
        what = f"no model or run matches the pattern {name}"
        raise InputError(what, fix="check the pattern; models are *.gguf files and folders")
    return models


def _is_candidate(folder: Path) -> bool:
    """Is this the folder of one model or of one run?"""
    if not folder.is_dir() or folder.name.startswith("."):
        return False
    if any((folder / name).exists() for name in ("config.json", MANIFEST)):
        return True
    return len(gguf_models(folder)) == 1 and not any(map(_is_candidate, folder.iterdir()))


# ── folders and runs ─────────────────────────────────────────────────────────────────────────────────────────────────
def short(name: str) -> str:
    """The name of a candidate in tables: the last part of the path of a folder or file."""
    return name_in(name) or name if may_be_stored(name) or Path(name).exists() else name


def place_of(candidate: LazyModel, place: Place) -> Place:
    """The place of a candidate's run, named after the variant or the model."""
    return place.within(folder_name(candidate.name, candidate.variant))


def folder_name(model: str, variant: str | None) -> str:
    return model if variant is None else variant.replace(" ", "-")


def require_candidates(candidates: Sequence[str], place: Place) -> None:
    """Refuse an empty list, and candidates with equal names in tables or with one folder for two runs."""
    if not candidates:
        raise InputError("there is no candidate", fix="name a model, or a run, after the baseline")
    if len({short(name) for name in candidates}) < len(candidates):
        raise InputError(
            "two candidates have the same name", fix="rename one folder, so that tables can tell them apart"
        )
    names = ["baseline", *(name_in(name) or "candidate" for name in candidates)]
    if place.out is not None and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(
            f"two runs of this comparison would lie in {place.out / twice}",
            fix="leave --out out, or rename a candidate's folder",
        )


def name_of(candidate: LazyModel) -> str:
    """The name of a candidate in tables."""
    return candidate.variant or short(candidate.name)


def require_both_fit(baseline: LazyModel, candidate: LazyModel, longest: int) -> None:
    """Prints about how much memory both models need, and refuses if it does not fit; loads neither.

    A model that is open already has its memory, and is not counted again.
    """
    models = {
        its: its.plugin.memory_need(its.subject, its.chosen.options, Work(longest)) for its in (baseline, candidate)
    }
    closed = {its: need for its, need in models.items() if not its.is_open}
    if not closed:
        return
    each = ", ".join(f"{size_words(need.size)} for {name_of(its)}{need.where}" for its, need in models.items())
    both = size_words(sum(need.size for need in models.values()))
    print_line(f"scoremode: both models run at the same time and need about {both} of memory ({each})")
    torch = sys.modules.get("torch")
    on_gpus = range(torch.cuda.device_count()) if torch is not None and torch.cuda.is_available() else ()
    free_on_gpus = sum(int(torch.cuda.mem_get_info(index)[0]) for index in on_gpus) if torch and on_gpus else None
    for on_gpu, left, device in ((False, available(), "this machine"), (True, free_on_gpus, "the GPU")):
        needed = sum(need.size for need in closed.values() if need.on_gpu is on_gpu)
        if left is not None and needed > left:
            what = f"about {size_words(needed)} of memory must be free for both models at once"
            raise EngineError(f"{what}, and {device} has {size_words(left)} left", fix=_other_way())


def _other_way() -> str:
    files = (kind.instead_of_states for kind in offered(FormatOffer) if kind.instead_of_states)
    return next(files, "use an unquantized checkpoint as the baseline")


def compared_with(run_p: Run, noise: Mapping[str, Any], candidate: LazyModel) -> dict[str, object]:
    """The fields of a candidate's manifest about its baseline and about the baseline's noise against itself.

    They include the name of a variant, because all variants of a model have the model's name.
    """
    of_p = run_p.manifest
    named = {} if candidate.variant is None else {"variant": candidate.variant}
    return {"against": {"model": of_p["model"], "fingerprint": of_p["model_fingerprint"]}, **named, **noise}


def as_comparison(
    name: str, baseline: Run, candidate: Run, divergences: Divergences, kl_missing: str | None = None
) -> Comparison:
    """Makes a Comparison of two runs of one plan. ``kl_missing`` says why there is no KL."""
    stored = candidate.manifest
    floor, words = (stored.get(key) for key in NOISE) if divergences.has("kl") else (None, None)
    keys = {"bytes": "weight_bytes"} | {key: key for key in KEPT}
    manifest = {name: stored[key] for name, key in keys.items() if stored.get(key)}  # older runs may lack some
    return Comparison(
        name=name,
        baseline=baseline,
        candidate=candidate,
        groups=baseline.facts.group,
        weight=baseline.facts.weight,
        divergences=divergences,
        noise_kl=None if floor is None else np.array(floor),
        manifest=manifest if kl_missing is None else {**manifest, "kl_missing": kl_missing},
        path=candidate.path,
        noise_perturbed=words,
        answer=answer_targets(candidate, baseline),
    )
