"""Routes of a mixture of experts: which tokens go to other experts than in the baseline, and what that costs.

A token's route in a layer is the set of experts that its row is sent to there. It is changed if the sets differ; their
order and weights do not matter. A target belongs to the row that predicts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scoremode.core.statistics.estimate import ratio, with_error_fields
from scoremode.values import Bools, Estimate, Floats, Ints

Routes = npt.NDArray[np.int16]
"""(layers, targets, experts of a token), ascending in the last axis"""


@dataclass(frozen=True, slots=True)
class Routing:
    """The routes of a candidate against those of its baseline."""

    names: tuple[str, str]  # of baseline and candidate
    changed: tuple[tuple[str, Estimate], ...]  # by layer: the share of tokens with other experts
    any_changed: Estimate  # share of tokens with other experts in at least one layer
    kl: Estimate  # nats per token, of all tokens
    kl_changed: Estimate  # of tokens with a changed route in at least one layer
    kl_same: Estimate  # of tokens without
    share_of_kl: Estimate  # of all KL, the part on tokens with a changed route
    experts: int  # that a token is sent to
    of_experts: int
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        names = ("any_changed", "kl", "kl_changed", "kl_same", "share_of_kl")
        return {
            "baseline": self.names[0],
            "candidate": self.names[1],
            "experts": self.experts,
            "of_experts": self.of_experts,
            "tokens": self.kl.n,
            "tokens_changed": self.kl_changed.n,
            **{key: value for name in names for key, value in with_error_fields(name, getattr(self, name)).items()},
            "layers": [{"layer": name, **with_error_fields("changed", share)} for name, share in self.changed],
            "notes": list(self.notes),
        }


def changed_routes(baseline: Routes, candidate: Routes) -> Bools:
    """Whether each target's set of experts differs, (layers, targets)."""
    found: Bools = (np.sort(baseline, axis=2) != np.sort(candidate, axis=2)).any(axis=2)
    return found


def routing_of(
    names: tuple[str, str],
    layers: tuple[str, ...],
    routes: tuple[Routes, Routes],
    kl: Floats,
    groups: Ints,
    *,
    of_experts: int,
    notes: tuple[str, ...] = (),
) -> Routing:
    """The agreement of two models' routes, and the KL (targets,) of tokens with and without a changed route."""
    changed = changed_routes(*routes)
    anywhere: Bools = np.asarray(changed.any(axis=0))
    ones, on_changed = np.ones(len(kl)), np.asarray(np.where(anywhere, kl, 0.0), np.float64)
    return Routing(
        names=names,
        changed=tuple((name, ratio(own, ones, groups, "share")) for name, own in zip(layers, changed, strict=True)),
        any_changed=ratio(anywhere, ones, groups, "share"),
        kl=ratio(kl, ones, groups, "positive"),
        kl_changed=_mean(kl, groups, anywhere),
        kl_same=_mean(kl, groups, ~anywhere),
        share_of_kl=ratio(on_changed, kl, groups, "share"),
        experts=routes[0].shape[2],
        of_experts=of_experts,
        notes=notes,
    )


def _mean(kl: Floats, groups: Ints, which: Bools) -> Estimate:
    return ratio(kl[which], np.ones(int(which.sum())), groups[which], "positive")
