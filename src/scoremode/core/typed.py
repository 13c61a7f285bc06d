"""Values from a caller ─▶ values of the declared types, or one error that names the argument.

``typed`` checks every argument of a public function against the function's own signature, before the function begins.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, Unpack, cast, get_args, get_origin, get_type_hints, is_typeddict

from scoremode.core.arguments import LARGEST
from scoremode.errors import OptionError, WrongTypeError, listed, shortened

F = TypeVar("F", bound=Callable[..., Any])


def typed(function: F) -> F:
    """Checks each argument where a user hands it over; ``**arguments: Unpack[…]`` declare the types of several."""

    @functools.wraps(function)
    def checking(*arguments: Any, **named: Any) -> Any:
        signature, hints = declared(function)
        try:
            bound = signature.bind(*arguments, **named)
        except TypeError:
            return function(*arguments, **named)  # Python says what is missing, and of which function
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = [checked(name, each, hints[name]) for each in value]
            elif kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {key: checked(key, each, hints.get(key, Any)) for key, each in value.items()}
            else:
                bound.arguments[name] = checked(name, value, hints.get(name, Any))
        return function(*bound.args, **bound.kwargs)

    return cast(F, checking)


@functools.cache
def declared(function: Callable[..., Any]) -> tuple[inspect.Signature, Mapping[str, Any]]:
    """The signature that was written, and the type of each argument by name. Names of types are looked up only here."""
    written = inspect.unwrap(function)
    signature, hints = inspect.signature(written), get_type_hints(written)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and get_origin(hints[name]) is Unpack:
            hints |= get_type_hints(get_args(hints.pop(name))[0])
    return signature, hints


def checked(name: str, value: Any, hint: Any) -> Any:
    """Returns a value as a type hint declares it. WrongTypeError says that it has another type, and which would do.

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
    inner: WrongTypeError | None = None  # is about a part of the value, and so says more
    if kind in (Union, UnionType):
        for each in inside:
            try:
                return checked(name, value, each)
            except WrongTypeError as error:
                inner = inner if error.name == name else error
        raise inner or _refusal(name, value, hint)
    try:
        return _read(name, value, kind, inside)
    except WrongTypeError:
        raise
    except (TypeError, ValueError):
        raise _refusal(name, value, hint) from None
    except OverflowError:
        raise OptionError(f"{name} is too large", fix="give a number below 2**63") from None


def _refusal(name: str, value: Any, hint: Any) -> WrongTypeError:
    from scoremode.core.disk.manifests import command_without_secrets, is_secret

    text = command_without_secrets([value])[0] if isinstance(value, str) else value
    is_short = isinstance(value, str | float | NoneType) or (isinstance(value, int) and abs(value) <= LARGEST)
    plain = is_short and not is_secret(name.rstrip("]'").removesuffix("_env"))
    shown = shortened(repr(text), 60) if plain else f"a value of the type {type(value).__name__}"
    return WrongTypeError(f"{name} is {shown}, which is not {listed(_words(hint), 'or')}", fix="give one", name=name)


def _words(hint: Any) -> list[str]:
    """What a type is for a user: several words for a choice of types."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return list(dict.fromkeys(word for each in get_args(hint) if each is not NoneType for word in _words(each)))
    if kind in SCALARS:
        return [SCALARS[kind][0]]
    if kind in LISTS or is_typeddict(kind) or kind is Mapping:
        return ["a list" if kind in LISTS else "a dictionary"]
    if getattr(kind, "_is_protocol", False) and "__call__" in vars(kind):
        return [f"a function of {listed(_parameters(kind.__call__))}"]
    named = "array" if kind.__name__ == "ndarray" else kind.__name__
    return [f"an {named}" if named[0] in "aeiouAEIOU" else f"a {named}"]


# ── kinds of types ───────────────────────────────────────────────────────────────────────────────────────────────────
def _read(name: str, value: Any, kind: Any, inside: tuple[Any, ...]) -> Any:
    """The value as its type has it; TypeError or ValueError if it has another type."""
    if kind is Any:
        return value
    if kind in SCALARS:
        return SCALARS[kind][1](value)
    if kind in LISTS:
        return _read_list(name, value, kind, inside)
    if kind is Mapping or is_typeddict(kind):
        hints = get_type_hints(kind) if is_typeddict(kind) else {}
        of_names, of_values = inside or (str, Any)
        return {
            checked(f"a name in {name}", key, of_names): checked(f"{name}[{key!r}]", each, hints.get(key, of_values))
            for key, each in _only(Mapping, value).items()
        }
    if getattr(kind, "_is_protocol", False):
        return _only_like(kind, value)
    return _only(kind, value) if kind.__name__ != "ndarray" else _only_array(inside, _only(kind, value))


def _read_list(name: str, value: Any, kind: Any, inside: tuple[Any, ...]) -> Any:
    items = value.tolist() if hasattr(value, "tolist") and not isinstance(value, Sequence) else value
    if isinstance(items, str | bytes | bytearray | memoryview | Mapping):
        raise TypeError
    if kind is Iterable and not isinstance(items, Collection):  # is read once, and later
        return (checked(f"{name}[{i}]", each, inside[0]) for i, each in enumerate(_only(Iterable, items)))
    _only(Collection if kind in (Collection, Iterable) else Sequence, items)
    if inside[0] is int and {*map(type, items)} == {int} and max(map(abs, items)) <= LARGEST:  # there may be millions
        found = list(items)
    else:
        hints = inside if kind is tuple and ... not in inside else inside[:1] * len(items)
        found = [checked(f"{name}[{i}]", each, hint) for i, (each, hint) in enumerate(zip(items, hints, strict=True))]
    return tuple(found) if kind is tuple or isinstance(value, tuple) else found


def _only(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _only_like(protocol: Any, value: Any) -> Any:
    """An object that has what a protocol names; a function must also take as many arguments as it will get."""
    if isinstance(_only(protocol, value), type):
        raise TypeError
    if "__call__" in vars(protocol):
        with suppress(ValueError):  # a function in C may not tell
            inspect.signature(value).bind(*_parameters(protocol.__call__))
    return value


def _parameters(method: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(method).parameters)[1:]


def _only_array(inside: tuple[Any, ...], value: Any) -> Any:
    import numpy as np

    if value.ndim != 1 or not np.can_cast(value.dtype, get_args(inside[1])[0], "same_kind"):
        raise TypeError
    return value


def _text(value: Any) -> str:
    return str.__str__(_only(str, value))  # of a subclass, the text itself


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
    return value if type(value) is int else number


def _switch(value: Any) -> bool:
    is_of_numpy = getattr(getattr(value, "dtype", None), "kind", "") == "b" and value.ndim == 0
    return bool(value if is_of_numpy else _only(bool, value))


def _path(value: Any) -> Path:
    return value if isinstance(value, Path) else Path(os.fspath(_only(os.PathLike, value)))


SCALARS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    str: ("a string", _text),
    int: ("a whole number", _whole),
    float: ("a number", _number),
    bool: ("True or False", _switch),
    Path: ("a path", _path),
    os.PathLike: ("a path", _path),
    NoneType: ("None", functools.partial(_only, NoneType)),
}
"""Types of single values: in words, and what reads them."""

LISTS = (Sequence, Collection, Iterable, list, tuple)
