"""Makes SGLang's own HiCache pools and controller work in host memory.

On a machine without an accelerator four things stand in the way; `install_cpu_support` removes each.
It fills gaps that SGLang leaves and replaces nothing that works:

``ALLOC_MEMORY_FUNCS["cpu"]``
    Host pools always ask for pinned memory, and pinning calls CUDA's runtime. The table has no entry for CPU device
    pools; this one takes memory from the same allocator and does not pin it.
``pool_host.mha``, ``mla`` and ``dsa``
    They import the ``direct`` copy operators only where CUDA or ROCm is present. Those of `copy_ops` stand in.
``pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES``
    Host pools leave 10 GiB of memory free, more than many laptops have. 1 GiB is left free instead.
``torch.cpu.Stream.synchronize``
    SGLang waits for the stream of a copy that failed. Without that method its error would hide the copy's own.

Only ``--hicache-io-backend direct`` with the host layouts ``layer_first`` and ``page_first_direct``
works on a CPU: the ``kernel`` backend needs CUDA. Streams and events come from ``torch.cpu`` and are
complete at once, so a CPU run cannot show a missing wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.pool_host import base, common, dsa, mha, mla
from sglang.srt.utils import is_cuda, is_hip, is_hpu, is_mps, is_musa, is_npu, is_xpu

from ..host.memory import CPU_RESERVE_BYTES
from . import copy_ops

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host.common import HostTensorAllocator

_COPY_OPERATORS = {
    "transfer_kv_direct": copy_ops.transfer_kv_direct,
    "transfer_kv_all_layer_direct_lf_pf": copy_ops.transfer_kv_all_layer_direct_lf_pf,
    "transfer_kv_per_layer_direct_pf_lf": copy_ops.transfer_kv_per_layer_direct_pf_lf,
}

_changes: list[str] = []


def install_cpu_support() -> bool:
    """Fill the gaps above if, and only if, this machine has no accelerator; True if HiCache can use the CPU now.

    With an accelerator nothing is touched and the answer is False. Calling it again changes nothing.
    """
    if accelerator_present():
        return False
    if "cpu" not in common.ALLOC_MEMORY_FUNCS:
        common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate_unpinned
        _changes.append("host memory of CPU device pools is not pinned")
    for module in (mha, mla, dsa):
        for name, operator in _COPY_OPERATORS.items():
            if not hasattr(module, name):
                setattr(module, name, operator)
                _changes.append(f"{module.__name__}.{name} copies in plain host memory")
    if base.HICACHE_HOST_MEMORY_RESERVE_BYTES > CPU_RESERVE_BYTES:
        kept_gib = base.HICACHE_HOST_MEMORY_RESERVE_BYTES / 2**30
        base.HICACHE_HOST_MEMORY_RESERVE_BYTES = CPU_RESERVE_BYTES
        _changes.append(f"host pools leave {CPU_RESERVE_BYTES / 2**30:g} GiB free instead of {kept_gib:g}")
    if not hasattr(torch.cpu.Stream, "synchronize"):
        setattr(torch.cpu.Stream, "synchronize", _nothing_to_wait_for)  # noqa: B010  # torch's types lack it
        _changes.append("streams of the CPU can be waited for")
    return True


def installed_cpu_support() -> tuple[str, ...]:
    """What `install_cpu_support` changed in this process, a phrase each; empty if it did not run or was inert."""
    return tuple(_changes)


def accelerator_present() -> bool:
    """True where SGLang, or torch, would run on anything but a CPU."""
    probes = (is_cuda, is_hip, is_npu, is_xpu, is_musa, is_hpu, is_mps)
    return any(probe() for probe in probes) or torch.accelerator.is_available()


def _nothing_to_wait_for(_stream: torch.cpu.Stream) -> None:
    """What is submitted to a CPU stream has ended."""


def _allocate_unpinned(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: HostTensorAllocator,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    """SGLang's signature of a host allocation; what pins memory in it is ignored."""
    del pin_memory, registration_granularity_bytes
    return allocator.allocate(dims, dtype=dtype, device=device)
