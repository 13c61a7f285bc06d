"""Documents of tasks that cannot be scored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scoremode.errors import InputError
from scoremode.harness.documents import _document


@pytest.mark.parametrize(
    ("choices", "says"),
    [(["a"], "document 3 of mine has 1 choices"), (["a", ""], "choice 2 of document 3 of mine is empty")],
)
def test_choices_that_cannot_be_compared_are_named(choices: list[str], says: str) -> None:
    """An empty choice has no length to divide its log-probability by, which numpy alone would warn of."""
    task: Any = SimpleNamespace(
        OUTPUT_TYPE="multiple_choice", doc_to_choice=lambda _: choices, config=SimpleNamespace(task="mine")
    )
    instances: list[Any] = [SimpleNamespace(idx=i, args=("q", f" {one}"), doc={}) for i, one in enumerate(choices)]
    with pytest.raises(InputError, match=says):
        _document(task, 3, instances)
