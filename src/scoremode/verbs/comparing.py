"""What every comparison needs, whatever its baseline is: folders, the candidate's run, and both runs as one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.errors import InputError
from scoremode.remote.uri import Place, may_be_stored, name_in
from scoremode.statistics.comparison import Comparison
from scoremode.store.run import Run
from scoremode.values import Floats
from scoremode.verbs.progress import Progress

NOISE = ("noise_kl", "noise_perturbed")  # of a manifest


def short(name: str) -> str:
    """What a candidate is called in tables: the last part of the path of a folder or file."""
    return name_in(name) or name if may_be_stored(name) or Path(name).exists() else name


@dataclass(frozen=True, slots=True)
class Folders:
    """Where the runs of a comparison go."""

    out: Path | Place | None
    fresh: bool
    progress: Progress | None

    def folder(self, name: str) -> Path | Place | None:
        """For the run of that name; a model's name may be a path, of which the last part is taken."""
        return None if self.out is None else self.out / (name_in(name) or "candidate")

    def require_a_folder_each(self, candidates: Sequence[str]) -> None:
        """Refuse candidates whose runs would lie in one folder, before one of them is scored."""
        names = ["baseline", *(name_in(name) or "candidate" for name in candidates)]
        if self.out is not None and len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(
                f"two runs of this comparison would lie in {self.out / twice}",
                fix="leave --out out, or rename a candidate's folder",
            )


def compared_with(run_p: Run, noise: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest of a candidate says of its baseline, and of how far that one is from itself."""
    of_p = run_p.manifest
    return {"against": {"model": of_p["model"], "fingerprint": of_p["model_fingerprint"]}, **noise}


def as_comparison(
    name: str, baseline: Run, candidate: Run, kl: Floats | None, kl_missing: str | None = None
) -> Comparison:
    """Two runs of one plan, whose groups and weights are kept with each. ``kl_missing`` says why there is no KL."""
    floor, words = noise_of(candidate) if kl is not None else (None, None)
    return Comparison(
        name,
        baseline,
        candidate,
        baseline.facts.group,
        baseline.facts.weight,
        kl,
        floor,
        {**_sizes(candidate), **({} if kl_missing is None else {"kl_missing": kl_missing})},
        candidate.path,
        words,
    )


def noise_of(run: Run) -> tuple[Floats | None, str | None]:
    """The noise floor that a run was given, and the words that say how it was measured, or why it was not."""
    kl, words = (run.manifest.get(name) for name in NOISE)
    return None if kl is None else np.array(kl), words


def _sizes(run: Run) -> dict[str, Any]:
    """What the report groups candidates by, and draws against divergence; runs of other versions may not have it."""
    keys = {"bytes": "weight_bytes"} | {key: key for key in ("bits_per_weight", "model_format", "sizes", "engine")}
    return {name: run.manifest[key] for name, key in keys.items() if run.manifest.get(key)}
