"""The version of the numbers: raised when a change of scoremode's own code moves scores."""

from __future__ import annotations

NUMERICS = 1
"""Part of every run's identity: a stored run is used again only under the same number.

Raise it with every change after which the same model, text, settings and library versions may give another score: a
kernel that adds in another order, another default of an engine, a plan that is cut differently under the same name.
The package's version is not part of the identity, because most releases move no score and some changes come between
releases.
"""
