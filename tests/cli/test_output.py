"""JSON is indented as ``json.dump`` does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scoremode.console.output import indented, print_json_list

ODD = ['"', "\\", "\n\t\x00\x7f", "\u2028", "é東👩‍🔬", "</script>", ""]
VALUES: list[Any] = [
    {},
    {"a": {}, "b": [], "c": None},
    {"text": ODD, "inner": [{"x": text, "y": [1, 2.5, -1e-300, True]} for text in ODD]},
    {"tokens": [{"id": 1, "logprob": -5.545177444479562, "rank": None}], "é": "ß"},
    [[1, [2, []]], {"deep": {"deeper": {"deepest": [1]}}}],
]


@pytest.mark.parametrize("value", VALUES)
def test_the_fast_writer_indents_as_json_does(value: Any) -> None:
    assert indented(value) == json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_list_in_parts_is_the_whole_list(capsys: pytest.CaptureFixture[str], count: int) -> None:
    values = [value for value in VALUES if isinstance(value, dict)][:count]
    print_json_list(iter(values))
    assert capsys.readouterr().out == json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def test_what_json_has_no_number_for_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        indented({"x": float("inf")})
