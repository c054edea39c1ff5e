"""An out-of-tree SGLang platform for machines that have nothing but a CPU.

SGLang asks every installed platform whether it applies (`activate`); this one says no wherever SGLang or torch would
use an accelerator, and wherever the user asked for SGLang's own CPU engine. Where it applies, SGLang gets pools and
an allocator without Triton and the ``torch_native`` attention backend, in plain torch: slow, exact, and enough to
run a small model, HiCache and every layout on a laptop.
"""

from __future__ import annotations

import os

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from typing_extensions import override

from ..seam.platforms import PoolClasses, PoolName

PLATFORM_CLASS = f"{__name__}.HostCpuPlatform"


def activate() -> str | None:
    """The platform's class, or None where it must be inert.

    Called while SGLang is being imported, so it looks at torch and nothing else.
    """
    import torch

    wants_cpu_engine = os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"
    if wants_cpu_engine or torch.accelerator.is_available():
        return None
    return PLATFORM_CLASS


class HostCpuPlatform(CpuDeviceMixin, PoolClasses):
    """Plain torch in host memory."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_device(self, local_rank: int | None = None) -> str:
        """The one device, by name, as SGLang needs it to fill in a missing ``--device``."""
        return self.device_name

    @override
    def is_pin_memory_available(self, device: object = None) -> bool:
        """There is nothing to pin memory for."""
        return False

    @override
    def get_default_attention_backend(self) -> str:
        """The backend that is plain torch."""
        return "torch_native"

    def pool_class(self, kind: PoolName) -> type:
        """SGLang's own without Triton, which its pool of keys and values does not need."""
        if kind == "mha":
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool
        from .pools import CpuDSATokenToKVPool, CpuMLATokenToKVPool

        return CpuMLATokenToKVPool if kind == "mla" else CpuDSATokenToKVPool

    @override
    def get_paged_allocator_cls(self) -> type:
        """SGLang's without Triton."""
        from .pools import CpuPagedTokenToKVPoolAllocator

        return CpuPagedTokenToKVPoolAllocator

    @override
    def get_graph_runner_cls(self) -> None:
        """There are no graphs to capture."""
        return

    @override
    def get_dispatch_key_name(self) -> str:
        """Operators run their plain-torch version."""
        return "native"


def use_absorbed_mla() -> None:
    """Make DeepSeek models on ``torch_native`` attend to the latent rows, the only form that the backend can read."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda _attention, _batch: AttnForwardMethod.MLA)
