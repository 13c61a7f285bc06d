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
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, cast

from scoremode.core.typed import checked
from scoremode.errors import OptionError, did_you_mean

HUB_TOKEN = "set HF_TOKEN in the environment, or type hf auth login once"
Kind = Literal["str", "int", "float", "bool", "Pairs"]
Plain = str | float | bool | list[Any] | dict[str, Any] | None
Pairs = tuple[tuple[str, Plain], ...]
"""Names and values: ``--engine-arg NAME=VALUE``, repeated; in Python also a dictionary."""
TYPES: dict[Kind, Any] = {"str": str, "int": int, "float": float, "bool": bool, "Pairs": Mapping[str, Plain] | Pairs}

DTYPES = ("float32", "float16", "bfloat16", "float64")
DTYPE_ALIASES = {
    **{"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16"},
    **{"bf16": "bfloat16", "fp64": "float64", "double": "float64"},
}


@dataclass(frozen=True, slots=True)
class Details:
    """Details of an option in addition to its name, type and default."""

    help: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    aliases: Mapping[str, str] | None = None  # other spellings of choices; the choice itself is stored
    above: float | None = None  # numbers must be larger
    at_most: float | None = None
    flag: str | None = None  # if it is not the name with dashes
    older_flags: tuple[str, ...] = ()  # still understood
    in_identity: bool = True  # may it change a score?
    identity_name: str | None = None  # if runs that were kept earlier know it by another name
    path: str | None = None  # the only path on which it is read: see core/plan/path.py; None: it is read on all of them
    cache_part: str | None = None  # of a type of the K/V cache: "k", "v" or "kv"; ``compare`` takes several types
    may_vary: bool = True  # is it worth comparing values of it, as ``scoremode paths --vary`` does?
    group: str | None = None  # heading in --help; None: the engine's own
    instead_of_flag: str | None = None  # of a secret, which only Python may pass: what to do on the command line


def option(help: str, **details: Any) -> Any:
    """A field of an engine's options; ``details`` are the other fields of Details."""
    return field(default=None, metadata={"option": Details(help, **details)})


def hub_token() -> Any:
    """The option for an access token of the hub. The command line has no such flag: ``ps`` would show the token."""
    words = "access token for the hub (default: `HF_TOKEN`, or the one that `hf auth login` stored)"
    return option(words, in_identity=False, may_vary=False, instead_of_flag=HUB_TOKEN)


@dataclass(frozen=True, slots=True)
class KnownOption:
    """One option with its name, type and details, for the command line, the docs and checks."""

    name: str
    kind: Kind
    details: Details

    @property
    def flag(self) -> str:
        return self.details.flag or "--" + self.name.replace("_", "-")

    def type_in_python(self) -> str:
        """The type that its values have in Python, as it is written, without None."""
        kind = {"Pairs": "Mapping[str, Plain] | Pairs"}.get(self.kind, self.kind)
        return f"{kind} | Sequence[{kind}]" if self.details.cache_part else kind

    def checked(self, value: Any) -> Any:
        """The value as the engine gets it; OptionError if it is not allowed."""
        d = self.details
        if d.cache_part is not None and isinstance(value, list | tuple):
            raise OptionError(
                f"{self.flag} has {len(value)} values, and only compare takes several types of the K/V cache",
                fix=f"give one, or use scoremode compare MODEL {self.flag} {','.join(map(str, value[:2]))}",
            )
        value = checked(self.name, value, TYPES[self.kind])
        if self.kind == "Pairs":
            return tuple(value.items()) if isinstance(value, Mapping) else value
        if self.kind == "str":
            value = (d.aliases or {}).get(value, value)
        if d.choices is not None and value not in d.choices:
            listed = " or ".join(d.choices) if len(d.choices) < 4 else f"one of {', '.join(d.choices)}"
            raise OptionError(f"{self.flag} {value} is not known", fix=f"give {listed}")
        if (d.above is not None and not value > d.above) or (d.at_most is not None and not value <= d.at_most):
            raise OptionError(f"{self.flag} {value} is not {self.bounds()}", fix="give another number")
        return value

    def bounds(self) -> str:
        """The numbers that are allowed, in words."""
        d = self.details
        low = f"above {d.above}" if d.above is not None else ""
        high = f"up to {d.at_most}" if d.at_most is not None else ""
        return " and ".join(part for part in (low, high) if part)


@dataclass(frozen=True, slots=True)
class Options:
    """The base of all options: it has none. An engine with options subclasses it."""

    @classmethod
    def known(cls) -> dict[str, KnownOption]:
        """Every option by its name."""
        found = {}
        for f in fields(cls):
            kind = cast(Kind, str(f.type).removesuffix(" | None"))
            assert kind in ("str", "int", "float", "bool", "Pairs"), f"{cls.__name__}.{f.name} has the type {f.type}"
            found[f.name] = KnownOption(f.name, kind, f.metadata["option"])
        return found

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
