"""Pools of several ranks that share pages, in threads of one process, beside one pool that stores everything."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.mem_cache.hicache.cpu.pools import CpuDSATokenToKVPool, CpuMLATokenToKVPool
from sglang.srt.mem_cache.hicache.device.page_reader import SharedPages
from sglang.srt.mem_cache.layouts import CpSharedLayout, PoolKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.mem_cache.hicache.device.shared_pools import LayoutMLATokenToKVPool

PAGE = 64  # a DSA pool has no other
ROW_PAGES = 4
LATENT, ROTARY = 4, 2
INDEX_WIDTH = 128


class Sum:
    """Adds tensors of `ranks` threads up, as a process group would, and counts how often."""

    def __init__(self, ranks: int) -> None:
        self.calls = 0
        self._parts: list[torch.Tensor] = []
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._lock = threading.Lock()

    def __call__(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._parts.append(tensor.clone())
        self._barrier.wait()
        total = torch.stack(self._parts).sum(0).to(tensor.dtype)
        if self._barrier.wait() == 0:
            self._parts.clear()
            self.calls += 1
        self._barrier.wait()
        tensor.copy_(total)


class Ranks:
    """`ranks` pools that share pages, and one that has them all."""

    def __init__(self, kind: PoolKind, ranks: int) -> None:
        self.reduce = Sum(ranks)
        self.shared = [make_pool(kind, ROW_PAGES) for _ in range(ranks)]
        self.layouts = [CpSharedLayout(page_size=PAGE, shard_size=ranks, shard_rank=rank) for rank in range(ranks)]
        for layout, pool in zip(self.layouts, self.shared, strict=True):
            pool.access = SharedPages(layout, page_size=PAGE, lane_count=ranks, reduce=self.reduce)
        self.whole = make_pool(kind, ROW_PAGES * ranks + ranks)
        self._threads = ThreadPoolExecutor(ranks)

    def everywhere(self, act: Callable[[LayoutMLATokenToKVPool], Any]) -> list[Any]:
        """Do the same on every rank at once."""
        return list(self._threads.map(act, self.shared))

    def begin_batch(self, pages: list[int]) -> None:
        """The next forward pass reads these logical pages."""
        for pool in self.shared:
            pool.access.begin_batch(lambda: torch.tensor(pages))

    def write(self, layer: int, slots: torch.Tensor, *, index: bool = True) -> None:
        """Store random bits, NaNs and negative zeros among them, on the ranks and in the whole pool."""
        bits = torch.randint(-(2**15), 2**15, (len(slots), 1, LATENT + ROTARY), dtype=torch.int16)
        bits[0, 0, 0], bits[-1, 0, -1] = -(2**15), 0x7FC1  # -0.0 and a NaN of bfloat16
        rows = bits.view(torch.bfloat16)
        keys = torch.randint(0, 256, (len(slots), INDEX_WIDTH), dtype=torch.uint8)
        scales = torch.rand(len(slots), 1)

        def store(pool: LayoutMLATokenToKVPool) -> None:
            at: Any = SimpleNamespace(layer_id=layer)
            if layer % 2:
                pool.set_kv_buffer(at, slots, rows, rows)
            else:
                pool.set_mla_kv_buffer(at, slots, rows[..., :LATENT], rows[..., LATENT:])
            if index and isinstance(pool, CpuDSATokenToKVPool):
                pool.set_index_k_scale_buffer(layer, slots, keys, scales)

        for pool in (*self.shared, self.whole):
            store(pool)


def make_pool(kind: PoolKind, pages: int) -> LayoutMLATokenToKVPool:
    """A CPU pool of two layers for `pages` pages."""
    shape: dict[str, Any] = {
        "size": pages * PAGE,
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROTARY,
        "layer_num": 2,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind is PoolKind.DSA:
        return CpuDSATokenToKVPool(**shape, index_head_dim=INDEX_WIDTH, kv_cache_dim=LATENT + ROTARY)
    return CpuMLATokenToKVPool(**shape)


def slots_of(pages: list[int]) -> torch.Tensor:
    """All slots of logical pages."""
    return (torch.tensor(pages).unsqueeze(1) * PAGE + torch.arange(PAGE)).reshape(-1)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A bfloat16 tensor as integers: NaNs compare, zeros keep their sign."""
    return tensor.contiguous().view(torch.int16)


def index_pages(pool: LayoutMLATokenToKVPool, layer: int) -> torch.Tensor:
    """Index pages of a DSA pool, to be indexed by logical pages."""
    assert isinstance(pool, CpuDSATokenToKVPool)
    return pool.get_broadcastable_index_k_with_scale_buffer(layer)


def access_of(pool: LayoutMLATokenToKVPool) -> SharedPages:
    """The pool's access, which must be the sharing one."""
    assert isinstance(pool.access, SharedPages)
    return pool.access
