from collections import defaultdict
from typing import Protocol, type_check_only

import torch

class HostTensorAllocator:
    def allocate(self, dims: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor: ...

# How SGLang's host pools call an entry of the table below.
@type_check_only
class _AllocateHostMemory(Protocol):
    def __call__(
        self,
        dims: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
        pin_memory: bool,
        allocator: HostTensorAllocator,
        registration_granularity_bytes: int | None = None,
    ) -> torch.Tensor: ...

ALLOC_MEMORY_FUNCS: defaultdict[str, _AllocateHostMemory]

def _cuda_host_unregister(buffer: torch.Tensor) -> None: ...
