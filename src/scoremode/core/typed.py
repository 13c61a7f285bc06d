"""Values from a caller ─▶ values of the declared types, or one error that names the argument."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, Unpack, cast, get_args, get_origin, get_type_hints, is_typeddict

from scoremode.core.arguments import LARGEST
from scoremode.core.disk.manifests import command_without_secrets, is_secret
from scoremode.errors import OptionError, WrongTypeError, listed, shortened

F = TypeVar("F", bound=Callable[..., Any])
Parameter = inspect.Parameter


def typed(function: F) -> F:
    """Checks every argument of a public function against its declared type, before the function begins."""

    @functools.wraps(function)
    def checking(*arguments: Any, **keywords: Any) -> Any:
        signature, hints = declared(function)
        try:
            bound = signature.bind(*arguments, **keywords)
        except TypeError:
            return function(*arguments, **keywords)  # Python says what is missing, and of which function
        for name, value in bound.arguments.items():
            if signature.parameters[name].kind is Parameter.VAR_KEYWORD:
                bound.arguments[name] = {key: checked(key, each, hints.get(key, Any)) for key, each in value.items()}
            else:
                bound.arguments[name] = checked(name, value, hints.get(name, Any))
        return function(*bound.args, **bound.kwargs)

    return cast(F, checking)


@functools.cache
def declared(function: Callable[..., Any]) -> tuple[inspect.Signature, Mapping[str, Any]]:
    """The signature that was written, and the type of each argument, of those too that ``**arguments`` stand for."""
    written = inspect.unwrap(function)
    signature, hints = inspect.signature(written), get_type_hints(written)
    for name, parameter in signature.parameters.items():
        if parameter.kind is Parameter.VAR_POSITIONAL:
            hints[name] = Sequence[hints[name]]  # type: ignore[valid-type]
        elif parameter.kind is Parameter.VAR_KEYWORD and get_origin(hints[name]) is Unpack:
            hints |= get_type_hints(get_args(hints[name])[0])
    return signature, hints


def checked(name: str, value: Any, hint: Any) -> Any:
    """Returns a value as a type hint declares it; WrongTypeError if it has another type.

    Numbers of NumPy become Python's own, arrays become lists where lists are declared, and paths become Paths.

    >>> import numpy as np
    >>> checked("stride", np.int64(3), int | None), checked("corpus", np.array(["a", "b"]), str | Sequence[str])
    (3, ['a', 'b'])
    >>> checked("sequences", [1, "4"], int | Sequence[int])
    Traceback (most recent call last):
    ...
    scoremode.errors.WrongTypeError: sequences[1] is '4', which is not a whole number; give one
    """
    kind, inside = get_origin(hint) or hint, get_args(hint)
    inner: WrongTypeError | None = None  # about a part of the value, which says more
    try:
        if kind not in (Union, UnionType):
            return _read(name, value, kind, inside)
        for each in inside:
            try:
                return checked(name, value, each)
            except WrongTypeError as error:
                inner = inner if error.name == name else error
    except WrongTypeError:
        raise
    except OverflowError:
        raise OptionError(f"{name} is too large", fix="give a number below 2**63") from None
    except (TypeError, ValueError):
        pass
    raise inner or WrongTypeError(name, _shown(name, value), listed(list(dict.fromkeys(_words(hint))), "or"))


def _shown(name: str, value: Any) -> str:
    """A short value that is no secret; of others, the type."""
    is_short = isinstance(value, str | float | NoneType) or (isinstance(value, int) and abs(value) <= LARGEST)
    if not is_short or is_secret(name.rstrip("]'").removesuffix("_env")):  # some type a key as the name of its variable
        return f"a value of the type {type(value).__name__}"
    return shortened(repr(command_without_secrets([value])[0] if isinstance(value, str) else value), 60)


def _words(hint: Any) -> list[str]:
    """What a user may give; several words for a choice of types."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return [word for each in get_args(hint) if each is not NoneType for word in _words(each)]
    if kind in SCALARS or kind in LISTS:
        return [SCALARS[kind][0] if kind in SCALARS else "a list"]
    if parameters := _parameters(kind):
        return [f"a function of {listed(parameters)}"]
    noun = "dictionary" if kind is Mapping or is_typeddict(kind) else kind.__name__.replace("nd", "")
    return [f"an {noun}" if noun[0] in "aeiouAEIOU" else f"a {noun}"]


def _parameters(kind: Any) -> list[str]:
    """The names of what a function gets, of a protocol of functions."""
    is_function = getattr(kind, "_is_protocol", False) and "__call__" in vars(kind)
    return list(inspect.signature(kind.__call__).parameters)[1:] if is_function else []


# ── kinds of types: each reads a value, and raises TypeError or ValueError if it has another type ────────────────────
def _read(name: str, value: Any, kind: Any, inside: tuple[Any, ...]) -> Any:
    if kind is Any:
        return value
    if kind in SCALARS:
        return SCALARS[kind][1](value)
    if kind in LISTS:
        return _read_list(name, value, kind, inside)
    if kind is Mapping or is_typeddict(kind):
        hints, (of_names, of_values) = get_type_hints(kind) if kind is not Mapping else {}, inside or (str, Any)
        return {
            checked(f"a name in {name}", key, of_names): checked(f"{name}[{key!r}]", each, hints.get(key, of_values))
            for key, each in _only(Mapping, value).items()
        }
    if isinstance(_only(kind, value), type):  # a class has the methods of a protocol as well
        raise TypeError
    if kind.__name__ == "ndarray":
        import numpy as np

        if value.ndim != 1 or not np.can_cast(value.dtype, get_args(inside[1])[0], "same_kind"):
            raise TypeError
    if parameters := _parameters(kind):
        with suppress(ValueError):  # a function in C may not tell
            inspect.signature(value).bind(*parameters)
    return value


def _read_list(name: str, value: Any, kind: Any, inside: tuple[Any, ...]) -> Any:
    items = value.tolist() if hasattr(value, "tolist") and not isinstance(value, Sequence) else value
    if isinstance(items, str | bytes | bytearray | memoryview | Mapping):
        raise TypeError
    if kind is Iterable and not isinstance(items, Collection):  # is read once, and later
        return (checked(f"{name}[{i}]", each, inside[0]) for i, each in enumerate(_only(Iterable, items)))
    _only(Collection if kind in (Collection, Iterable) else Sequence, items)
    kinds = {*map(type, items)}  # there may be millions
    if kinds == {inside[0]} and (inside[0] is not int or max(map(abs, items)) <= LARGEST):
        values = list(items)
    else:
        hints = inside if kind is tuple and ... not in inside else inside[:1] * len(items)
        values = [checked(f"{name}[{i}]", each, hint) for i, (each, hint) in enumerate(zip(items, hints, strict=True))]
    return tuple(values) if kind is tuple or isinstance(value, tuple) else values


def _only(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _whole(value: Any) -> int:
    number = operator.index(value)
    if isinstance(value, bool):
        raise TypeError
    if abs(number) > LARGEST:
        raise OverflowError
    return number


def _number(value: Any) -> int | float:
    number = float(_only(Real, value))
    if isinstance(value, bool) or math.isnan(number):
        raise TypeError
    return int(value) if isinstance(value, Integral) else number


def _switch(value: Any) -> bool:
    is_of_numpy = getattr(getattr(value, "dtype", None), "kind", "") == "b" and value.ndim == 0
    return bool(value if is_of_numpy else _only(bool, value))


SCALARS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    str: ("a string", lambda value: str.__str__(_only(str, value))),  # of a subclass, the text itself
    int: ("a whole number", _whole),
    float: ("a number", _number),
    bool: ("True or False", _switch),
    Path: ("a path", lambda value: Path(os.fspath(_only(os.PathLike, value)))),
    os.PathLike: ("a path", lambda value: Path(os.fspath(_only(os.PathLike, value)))),
    NoneType: ("None", functools.partial(_only, NoneType)),
}
"""Types of single values, in words, and what reads them."""

LISTS = (Sequence, Collection, Iterable, list, tuple)
