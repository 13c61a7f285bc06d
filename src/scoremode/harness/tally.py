"""What happened to requests on the way to the engine: counted, with an example of each."""

from __future__ import annotations

from typing import Any

from scoremode.errors import one_line, print_line
from scoremode.harness.encoding import Encoded


class Tally:
    """Counts of requests since the model was made."""

    def __init__(self) -> None:
        self.requests = self.spanning = self.truncated = self.truncated_tokens = 0
        self._examples: dict[str, str] = {}
        self._told = (0, 0)
        self._numbered = 0

    def next_number(self) -> int:
        """Numbers of requests in the files that are kept, from 0."""
        self._numbered += 1
        return self._numbered - 1

    def add(self, request: Any, encoded: Encoded) -> None:
        self.requests += 1
        if encoded.spanning:
            self.spanning += 1
            self._examples.setdefault("spanning", _example(request))
        if encoded.truncated:
            self.truncated += 1
            self.truncated_tokens += encoded.truncated
            self._examples.setdefault("truncated", _example(request))

    def tell(self) -> None:
        """Say on standard error what is new since the last time."""
        spanning, truncated = self.spanning - self._told[0], self.truncated - self._told[1]
        self._told = (self.spanning, self.truncated)
        if spanning:
            print_line(
                f"scoremode: in {spanning} of {self.requests} requests a token spans the end of the context, so that "
                f"the harness's rule scores other tokens than the text has; as in {self._examples['spanning']}"
            )
        if truncated:
            print_line(
                f"scoremode: {truncated} of {self.requests} requests were longer than the context and lost "
                f"{self.truncated_tokens} tokens on their left; as in {self._examples['truncated']}"
            )

    def as_json(self) -> dict[str, Any]:
        return {
            "loglikelihood": self.requests,
            "spanning": self.spanning,
            "truncated": self.truncated,
            "truncated_tokens": self.truncated_tokens,
            "examples": dict(self._examples),
        }


def _example(request: Any) -> str:
    context, continuation = request.args
    end = "…" + context[-30:] if len(context) > 30 else context
    begin = continuation[:30] + "…" if len(continuation) > 30 else continuation
    where = f"document {request.doc_id} of {request.task_name}: " if request.task_name else ""
    return one_line(f"{where}{end!r} + {begin!r}")
