"""The path by which an engine feeds the tokens of a window.

prefill   all tokens in one pass, as a prompt is read
decode    one token per step, with the keys and values of the tokens before it in a cache, as text is generated

The targets are the same on both paths. A path belongs to a plan's settings, and so to the identity of a run.

Servers mix one more way into prefill, which belongs to an engine and not to a plan:

chunked   a prompt is read in several passes, of so many tokens each
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from scoremode.core.typed import checked
from scoremode.errors import OptionError, did_you_mean

PREFILL, DECODE = PATHS = ("prefill", "decode")
CHUNKED = "chunked"
CHUNK_TOKENS = 256  # of a chunk, if the user gives no number
SEQUENCES = 16  # side by side, if the user gives no number
MOST_SEQUENCES = 4096


@dataclass(frozen=True, slots=True)
class DecodePath:
    """The decode path and its settings. The prefill path has no settings, and is written as None.

    An engine feeds ``sequences`` windows side by side. It feeds the first ``prefill_tokens`` tokens of each window in
    one pass, and then every other token in a step of its own. So the rows before ``prefill_tokens`` come from the
    prefill, and each later row comes from one step.
    """

    sequences: int = SEQUENCES
    prefill_tokens: int = 1

    def settings(self) -> dict[str, Any]:
        """Returns the settings that a plan of this path has in addition to those of its method."""
        return {"path": DECODE, **asdict(self)}


def read_path(path: str | None = None, *, sequences: Any = None, prefill_tokens: Any = None) -> DecodePath | None:
    """Reads a path and its settings as a user gave them; None means the prefill path, which is the default."""
    if path is not None and path not in PATHS:
        raise OptionError(f"there is no path {path}", fix=did_you_mean(path, PATHS))
    settings = {"sequences": sequences, "prefill_tokens": prefill_tokens}
    numbers: dict[str, int] = {}
    for name, value in settings.items():
        number, flag = checked(name, value, int | None), f"--{name.replace('_', '-')}"  # only ``paths`` takes several
        if number is None:
            continue
        if path != DECODE:
            raise OptionError(f"{flag} belongs to the decode path", fix=f"add --path decode, or leave {flag} out")
        if number < 1:
            raise OptionError(f"{flag} {number} is less than 1", fix="give 1 or more")
        numbers[name] = number
    if numbers.get("sequences", 1) > MOST_SEQUENCES:
        raise OptionError(f"--sequences {sequences} is too many", fix=f"give {MOST_SEQUENCES} or fewer")
    return DecodePath(**numbers) if path == DECODE else None


def path_of(settings: Mapping[str, Any]) -> DecodePath | None:
    """Returns the path in the settings of a plan or of a stored run; None means the prefill path."""
    if settings.get("path") != DECODE:
        return None
    return DecodePath(int(settings["sequences"]), int(settings["prefill_tokens"]))
