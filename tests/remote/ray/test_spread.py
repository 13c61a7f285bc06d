"""The arguments about replicas, without Ray: what is read, and that they are gone if no wing runs replicas."""

from __future__ import annotations

from typing import Any

import pytest

import scoremode as sm
from scoremode.core import extensions
from scoremode.core.extensions import ReplicasOffer
from scoremode.core.verbs.replicas import Spread, read_spread
from scoremode.errors import UnknownArgumentError
from tests.command_line import Command


def test_arguments_of_replicas_and_of_engines_are_told_apart() -> None:
    assert read_spread({"replicas": 2, "ray": None, "dtype": "float32"}) == (Spread(2), {"dtype": "float32"})
    assert read_spread({"ray": "auto"}) == (Spread(1, "auto"), {})
    assert read_spread({"dtype": "float32"}) == (None, {"dtype": "float32"})


def test_without_the_wing_its_arguments_and_flags_do_not_exist(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    rest = tuple(wing for wing in extensions.wings() if not isinstance((*wing.offers, None)[0], ReplicasOffer))
    assert len(rest) == len(extensions.wings()) - 1
    monkeypatch.setattr(extensions, "wings", lambda: rest)
    asked: dict[str, Any] = {"text": "any text"}
    for call in (
        lambda: sm.open("table:uniform", replicas=2),
        lambda: sm.ppl("table:uniform", replicas=2, **asked),
        lambda: sm.compare("table:uniform", "table:uniform", replicas=2, **asked),
    ):
        with pytest.raises(UnknownArgumentError, match="there is no argument replicas"):
            call()
    assert sm.ppl("table:uniform", **asked).manifest["targets"]
    refused = command("ppl", "table:uniform", "--text", "any text", "--replicas", "2")
    assert (refused.code, refused.err) == (2, "scoremode ppl: there is no flag --replicas; see scoremode ppl --help\n")
    assert "replica" not in command("ppl", "--help").out
