"""What a metadata object stores, how its fields split, and whose memory they hold: tools of the contract suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import TypeAlias

import numpy as np

AnyArray: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.generic]]"

SplitRule: TypeAlias = Callable[[object, object, object], bool]
"""Whether a field's value in a whole, its first and its second part go together, at any split point."""


def same(whole: object, first: object, second: object) -> bool:
    """The field describes the layout, not the node: both parts keep it."""
    return equal(whole, first) and equal(whole, second)


def joined(whole: object, first: object, second: object) -> bool:
    """The field is an array in node order: the parts' arrays one after the other are the whole."""
    return equal(whole, np.concatenate([np.asarray(first), np.asarray(second)]))


def summed(whole: object, first: object, second: object) -> bool:
    """The field counts something: the parts' numbers add up."""
    return isinstance(whole, int) and isinstance(first, int) and isinstance(second, int) and whole == first + second


def stored_fields(metadata: object) -> dict[str, object]:
    """Everything that the object stores: dataclass fields, slots and instance attributes.

    Not a dataclass's fields that no caller can give: they follow from the others, in every part anew.
    """
    declared = fields(metadata) if is_dataclass(metadata) else ()
    names = [field.name for field in declared]
    for cls in type(metadata).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
        names += list(getattr(cls, "__struct_fields__", ()))
    names += list(getattr(metadata, "__dict__", {}))
    left_out = {"__dict__", "__weakref__"} | {field.name for field in declared if not field.init}
    found = {name: getattr(metadata, name) for name in names if name not in left_out}
    assert found, f"cannot tell what {type(metadata).__name__} stores: use a dataclass, slots or attributes"
    return found


def stored_arrays(metadata: object) -> list[AnyArray]:
    """The numpy arrays among what the object stores."""
    return [value for value in stored_fields(metadata).values() if isinstance(value, np.ndarray)]


def check_own_memory(what: str, *arrays: AnyArray, arguments: Sequence[AnyArray]) -> None:
    """Fail if an array is a view of a larger one, or lies in the memory of an argument of the call that made it."""
    for array in arrays:
        assert array.base is None, f"{what} holds a view: it keeps {array.base.nbytes} bytes alive for {array.nbytes}"
        assert not any(np.shares_memory(array, other) for other in arguments), f"{what} shares memory with its argument"


def equal(one: object, other: object) -> bool:
    """Equality of plain values, or of arrays with their dtypes."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        left, right = np.asarray(one), np.asarray(other)
        return left.dtype == right.dtype and bool(np.array_equal(left, right))
    return bool(one == other)


def check_equal_metadata(one: object, other: object, what: str) -> None:
    """Fail, naming the field, unless both store the same."""
    left, right = stored_fields(one), stored_fields(other)
    for name in left.keys() | right.keys():
        assert equal(left.get(name), right.get(name)), f"{what}: {name} is {left.get(name)}, not {right.get(name)}"


def check_equal_arrays(one: object, other: object, what: str) -> None:
    """Fail, showing the difference, unless both are equal number by number."""
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=what)
