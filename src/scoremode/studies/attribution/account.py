"""The account of a candidate's damage: what its units explain, and what is left.

    sum of parts       every unit swapped alone, added up
    interaction        the whole minus the sum: units that make each other's damage larger, or smaller
    whole              all weights swapped, everything else as in the baseline
    rest               the served model minus the whole: activations, the cache of keys and values, and kernels
    served             the candidate as an engine serves it

Each line has a paired error: it is the mean of a difference per target, over groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremode.core.statistics.estimate import with_error_fields
from scoremode.studies.attribution.cells import Cells, Damage
from scoremode.values import Estimate


@dataclass(frozen=True, slots=True)
class Account:
    """KL in nats, line by line: parts + interaction = whole, whole + rest = served."""

    parts: Estimate
    interaction: Estimate
    whole: Estimate
    rest: Estimate | None
    served: Estimate | None

    @property
    def ratio(self) -> float | None:
        """The sum of parts over the whole; None if the whole is 0."""
        return self.parts.value / self.whole.value if self.whole.value else None

    def as_json(self) -> dict[str, Any]:
        lines = {name: getattr(self, name) for name in ("parts", "interaction", "whole", "rest", "served")}
        found: dict[str, Any] = {"parts_over_whole": self.ratio}
        for name, line in lines.items():
            found |= with_error_fields(name, line)
        return found


def account_of(cells: Cells, parts: Sequence[Damage], whole: Damage, served: Damage | None = None) -> Account:
    """The account of KL.

    >>> cells = Cells(np.arange(6), np.zeros(6, int), np.ones(6), np.ones(6, int))
    >>> one, both = (Damage(x, x, x) for x in (np.arange(6) / 10, np.arange(6) / 4))
    >>> account_of(cells, [one, one], both).interaction
    0.125 ± 0.038
    """
    total = np.sum([part.kl for part in parts], axis=0) if parts else np.zeros(len(cells.weight))
    with np.errstate(invalid="ignore"):  # an infinite KL minus another is not known
        interaction = cells.mean(whole.kl - total)
        rest = None if served is None else cells.mean(served.kl - whole.kl)
    return Account(
        parts=cells.mean(total, within="positive"),
        interaction=interaction,
        whole=cells.mean(whole.kl, within="positive"),
        rest=rest,
        served=None if served is None else cells.mean(served.kl, within="positive"),
    )
