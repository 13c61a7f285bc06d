"""The version of scoremode's numerics, increased when a change to its code changes scores."""

from __future__ import annotations

NUMERICS = 2
"""Part of every run's identity: a stored run is reused only if this number is the same.

Increase it with every change after which the same model, text, settings and library versions may give a different
score: a kernel that adds in a different order, a new default of an engine, a plan with different windows under the same
name. The package's version is not part of the identity, because most releases change no score and some changes happen
between releases.
"""
