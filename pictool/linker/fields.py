"""From names and values, as a command line or a file has them, to a frozen dataclass with typed fields."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar

from pictool.errors import InputError
from pictool.reading import shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)

MAX_INT = (1 << 31) - 1


def make(cls: type[T], name: str, values: Mapping[str, Any]) -> T:
    """`cls` from its fields; a text is converted to the field's type, and split at commas if that is a tuple.

    Fields may be of type int (at most `MAX_INT`, either sign), float (finite), str, or tuple[…, ...] of one of these.

    Args:
        name: what the messages call it.

    Raises:
        InputError: no such field, a field without default left out, or a value that does not fit.
    """
    types, known = typing.get_type_hints(cls), {field.name: field for field in fields(cls)}
    for field in values:
        if field not in known:
            has = f"its fields are {', '.join(known)}" if known else "it has no fields"
            raise InputError(f"{name} has no field {shown(field)}; {has}")
    for field, known_field in known.items():
        has_default = known_field.default is not MISSING or known_field.default_factory is not MISSING
        if field not in values and not has_default:
            raise InputError(f"{name}: {field}=… is required")
    return cls(**{field: _convert(name, field, types[field], value) for field, value in values.items()})


def _convert(name: str, field: str, kind: Any, value: Any) -> Any:
    try:
        if typing.get_origin(kind) is tuple:
            return tuple(_scalar(typing.get_args(kind)[0], item) for item in _items(value))
        return _scalar(kind, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name}: {field}={shown(value)} must be {_name_of(kind)}") from error


def _scalar(kind: type, value: Any) -> Any:
    if kind is int and not isinstance(value, bool) and (not isinstance(value, float) or value.is_integer()):
        if abs(number := int(value)) <= MAX_INT:
            return number
    elif kind is float and not isinstance(value, bool):
        if math.isfinite(real := float(value)):
            return real
    elif kind is str and isinstance(value, str):
        return value
    raise TypeError(kind)


def _items(value: Any) -> list[Any]:
    """The items of a list; a text is split at commas, and none of its items may be blank."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, list | tuple) else [value]
    items = [item.strip() for item in value.split(",")]
    if not all(items):
        raise ValueError(value)
    return items


def _name_of(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"a list of {typing.get_args(kind)[0].__name__}, separated by commas"
    bounds = {int: f", at most {MAX_INT}", float: ", and finite"}
    return f"of type {kind.__name__}{bounds.get(kind, '')}"
