"""Tensors that stand for the device's: whoever reads one on the host is told off.

On a GPU ``torch.cuda.set_sync_debug_mode("error")`` does this. On a CPU a tensor that went through `on_device`, and
whatever is computed from it, raises `DeviceReadError` where a GPU would make the host wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Tensor: Any = torch.Tensor
# Each needs values, or a shape that depends on values.
READS = frozenset(
    {
        "__array__", "__bool__", "__contains__", "__float__", "__index__", "__int__", "allclose", "argwhere", "cpu",
        "equal", "is_nonzero", "item", "masked_select", "nonzero", "numpy", "tolist", "unique", "unique_consecutive",
    }
)  # fmt: skip


class DeviceReadError(AssertionError):
    """A tensor of the device was read on the host."""


class DeviceTensor(torch.Tensor):
    """Behaves as its values do, but for being read."""

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        target = [*args[1:], *(kwargs or {}).values()]
        if name in READS or (name == "to" and any(str(value) == "cpu" for value in target)):
            raise DeviceReadError(f"{name} of a tensor on the device")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, its memory shared, as a tensor of the device."""
    return tensor.as_subclass(DeviceTensor)


def peek(tensor: torch.Tensor) -> torch.Tensor:
    """The values, for a test's own eyes."""
    return cast("torch.Tensor", tensor.as_subclass(_Tensor))
