"""The options of an engine: one dataclass, from which flags, help, Python arguments, docs and identities are made.

    @dataclass(frozen=True, slots=True)
    class DiceOptions(Options):
        sides: int | None = option("faces of the die", metavar="N")

gives ``--sides N`` on the command line, ``sides=`` in Python, a line in ``--help`` and in docs/engines.md, and the
entry "sides" in the identity of every run that was given it. A value of None means: the engine's own choice.

Nothing here imports anything heavy, because ``scoremode --help`` reads all options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from scoremode.core.options import KnownOption as KnownOption  # noqa: PLC0414 - plug-ins find these here
from scoremode.core.options import Pairs as Pairs  # noqa: PLC0414
from scoremode.core.options import Plain as Plain  # noqa: PLC0414
from scoremode.core.options import option as option  # noqa: PLC0414
from scoremode.core.options import options_of
from scoremode.errors import OptionError, did_you_mean

HUB_TOKEN = "set HF_TOKEN in the environment, or type hf auth login once"
DTYPES = ("float32", "float16", "bfloat16", "float64")
DTYPE_ALIASES = {
    **{"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16"},
    **{"bf16": "bfloat16", "fp64": "float64", "double": "float64"},
}


def hub_token() -> Any:
    """The option for an access token of the hub. The command line has no such flag: ``ps`` would show the token."""
    words = "access token for the hub (default: `HF_TOKEN`, or the one that `hf auth login` stored)"
    return option(words, in_identity=False, may_vary=False, instead_of_flag=HUB_TOKEN)


@dataclass(frozen=True, slots=True)
class Options:
    """The base of all options: it has none. An engine with options subclasses it."""

    @classmethod
    def known(cls) -> dict[str, KnownOption]:
        """Every option by its name."""
        return options_of(cls)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Makes options from values by name. None leaves the choice to the engine; an unknown name is an error."""
        known = cls.known()
        for name in given:
            if name not in known:
                raise OptionError(f"there is no option {name}", fix=did_you_mean(name, known))
        return cls(**{name: known[name].checked(value) for name, value in given.items() if value is not None})

    @property
    def limit(self) -> tuple[str, int] | None:
        """The flag with which a user limited the length of windows, and the limit in tokens; None if none is set."""
        return None

    def given(self) -> dict[str, Any]:
        """The options that were chosen, by name. A switch that is False counts as not chosen."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    def identity(self) -> dict[str, Any]:
        """The chosen options that may change a score: a part of a run's identity."""
        known = self.known()
        return {
            known[name].details.identity_name or name: value
            for name, value in self.given().items()
            if known[name].details.in_identity
        }


@dataclass(frozen=True, slots=True)
class CheckpointOptions(Options):
    """Options of every engine that loads a Hugging Face checkpoint."""

    dtype: str | None = option(
        "float32, bfloat16, float16, float64 (also fp32, bf16, …) or auto (default: auto; float32 on a CPU)",
        choices=("auto", *DTYPES),
        aliases=DTYPE_ALIASES,
    )
    head: str | None = option("logits in float32, or as the model rounds them", choices=("exact", "as-served"))
    head_kernel: str | None = option(
        "fused, rows, blocked or plain (default: the fastest kernel that passes its self-test on this device)",
        metavar="NAME",
    )
    divergence: str | None = option(
        "columns of a comparison: KL alone, or all, with the other direction, overlap and first choices (default: kl)",
        choices=("kl", "all"),
    )
    trust_remote_code: bool | None = option(
        "execute Python code shipped with the model; off unless given", may_vary=False
    )
    revision: str | None = option(
        "branch, tag or commit of a model on the hub (default: main)", in_identity=False, may_vary=False
    )
    token: str | None = hub_token()
