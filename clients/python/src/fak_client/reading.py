"""From JSON to the frozen dataclasses that declare it.

Invariant: what is read is of the declared type, closed words included, or reading fails and says
where. Fields that are not declared are passed over: fak may add some, and renames none.
"""

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


class Unreadable(ValueError):
    """A value is not of its declared type."""


def read(kind: type[T], value: object, at: str = "the answer") -> T:
    """Reads `value` as `kind`: a dataclass, a word, a tuple, a mapping or a plain JSON value.

    Raises `Unreadable`, naming the place.
    """
    return cast(T, _read(kind, value, at))


def _read(kind: Any, value: object, at: str) -> object:  # noqa: ANN401 - typing's own forms
    form, parts = get_origin(kind), get_args(kind)
    # A bool is no int here, though it is one to Python.
    fits_plainly = kind in (str, int, bool) and type(value) is kind
    is_word = form is Literal and any(type(value) is type(part) and value == part for part in parts)
    if kind is object or fits_plainly or is_word:
        return value
    if dataclasses.is_dataclass(kind):
        return _read_fields(cast(type, kind), value, at)
    if form in (Union, types.UnionType):
        (kept,) = (part for part in parts if part is not type(None))
        return None if value is None else _read(kept, value, at)
    if form is tuple and isinstance(value, list):
        return tuple(_read(parts[0], item, f"{at}[{n}]") for n, item in enumerate(value))
    if form is Mapping and isinstance(value, dict):
        named, held = parts
        return {
            _read(named, key, f"a key of {at}"): _read(held, item, f"{at}.{key}")
            for key, item in value.items()
        }
    raise Unreadable(f"{at} is {_shown(value)}; it has to be {_told(kind)}")


@cache
def _declared(kind: type) -> dict[str, tuple[Any, bool]]:
    """The type of each field, and whether it may be absent."""
    hints = get_type_hints(kind)
    missing = dataclasses.MISSING
    return {
        field.name: (
            hints[field.name],
            field.default is not missing or field.default_factory is not missing,
        )
        for field in dataclasses.fields(kind)
    }


def _read_fields(kind: type, value: object, at: str) -> object:
    if not isinstance(value, dict):
        raise Unreadable(f"{at} is {_shown(value)}; it has to be an object")
    found = {}
    for name, (declared, may_be_absent) in _declared(kind).items():
        if name in value:
            found[name] = _read(declared, value[name], f"{at}.{name}")
        elif not may_be_absent:
            raise Unreadable(f"{at}.{name} is missing")
    return kind(**found)


def _told(kind: Any) -> str:  # noqa: ANN401 - typing's own forms
    if get_origin(kind) is Literal:
        return " or ".join(repr(word) for word in get_args(kind))
    return getattr(kind, "__name__", str(kind))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
