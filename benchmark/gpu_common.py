"""What the GPU benchmarks share: pools by name, page orders, bytes that tell pages apart, results written as they come.

They need a machine with an NVIDIA GPU, SGLang with its kernels, and this package installed into it.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang.srt.mem_cache.hicache.device.pools import (
    DsaGeometry,
    Geometry,
    MhaGeometry,
    MlaGeometry,
    build_device_pool,
    index_buffers,
    kv_buffers,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang.srt.mem_cache.memory_pool import KVCache

    from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray

PAGE_SIZE = 64
POISON = 0xA5
GEOMETRIES: dict[str, Geometry] = {
    "mla_bf16": MlaGeometry(),
    "dsa_fp8": DsaGeometry(dtype=torch.float8_e4m3fn),
    "dsa_bf16": DsaGeometry(),
    "mha_bf16": MhaGeometry(),
}


def run_beside_the_gpu() -> None:
    """Keep this process on processors of the GPU's NUMA node, as ``--numa-node`` does for a server; says which."""
    properties: Any = torch.cuda.get_device_properties(0)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    listed = Path("/sys/bus/pci/devices") / address / "local_cpulist"
    allowed = os.sched_getaffinity(0)
    near: set[int] = set()
    for part in listed.read_text(encoding="ascii").strip().split(",") if listed.exists() else ():
        first, _, last = part.partition("-")
        near.update(range(int(first), int(last or first) + 1))
    if near & allowed:
        os.sched_setaffinity(0, near & allowed)
    print(f"processors: {len(near & allowed)} of {len(allowed)} are beside the GPU", flush=True)


def make_device_pool(name: str, *, pages: int, layers: int) -> KVCache:
    """SGLang's pool `name` on the GPU, with `pages` pages and the padding page."""
    geometry = GEOMETRIES[name]
    return build_device_pool(
        geometry.kind, tokens=pages * PAGE_SIZE, page_size=PAGE_SIZE, layers=layers, device="cuda", geometry=geometry
    )


def page_views(device_pool: KVCache) -> list[torch.Tensor]:
    """Every buffer as int64 ``[pages, words]``; buffer n belongs to layer ``n % layer_num``."""
    kv = [_by_page(buffer, PAGE_SIZE) for buffer in kv_buffers(device_pool)]
    return kv + [_by_page(buffer, 1) for buffer in index_buffers(device_pool)]


def _by_page(buffer: torch.Tensor, rows_per_page: int) -> torch.Tensor:
    return buffer.view(torch.uint8).reshape(buffer.shape[0] // rows_per_page, -1).view(torch.int64)


def poison(device_pool: KVCache) -> None:
    """Overwrite the whole pool."""
    for view in page_views(device_pool):
        view.view(torch.uint8).fill_(POISON)


class PageContent:
    """Words of a page from one int64 key: another page, buffer or position differs in (nearly) every word."""

    def __init__(self, device_pool: KVCache, *, seed: int = 1) -> None:
        self.views = page_views(device_pool)
        self.layers = device_pool.layer_num
        generator = torch.Generator().manual_seed(seed)
        self._odd: list[torch.Tensor] = []
        self._salt: list[int] = []
        for view in self.views:
            words = torch.randint(-(2**62), 2**62, (view.shape[1],), generator=generator, dtype=torch.int64)
            self._odd.append((words * 2 + 1).cuda())
            self._salt.append(int(torch.randint(0, 2**62, (1,), generator=generator)))

    def expected(self, buffer: int, keys: torch.Tensor) -> torch.Tensor:
        """What buffer `buffer` holds for `keys`, ``[pages]``: ``[pages, words]``."""
        return (keys ^ self._salt[buffer])[:, None] * self._odd[buffer]

    def write(self, rows: torch.Tensor, keys: torch.Tensor) -> None:
        """Fill the pages `rows` of every buffer."""
        for buffer, view in enumerate(self.views):
            for part in _parts(len(rows)):
                view[rows[part]] = self.expected(buffer, keys[part])

    def wrong_pages(self, rows: torch.Tensor, keys: torch.Tensor) -> int:
        """Pages, over all buffers, with a wrong byte."""
        wrong = 0
        for buffer, view in enumerate(self.views):
            for part in _parts(len(rows)):
                wrong += int((view[rows[part]] != self.expected(buffer, keys[part])).any(dim=1).sum())
        return wrong


def _parts(count: int, step: int = 2048) -> Iterator[slice]:
    for start in range(0, count, step):
        yield slice(start, start + step)


def scatter(cache: HiRadixCache[Any], rng: np.random.Generator, lengths: Sequence[int] = (1,)) -> None:
    """From now on both tiers of `cache` hand out their pages in random order, in pieces of `lengths` neighbours.

    Slots are mirrored, so `rng` must be in the same state on all ranks.
    """
    slots: Any = cache.slots
    host: Any = cache.cache_controller.host_pages
    alloc_lanes, take = slots.alloc_lanes, host.take
    host_rng = np.random.default_rng(int(rng.integers(1 << 32)))  # ranks take different numbers of host pages

    def scattered_lanes(lanes: LaneArray) -> PageArray | None:
        pages: PageArray | None = alloc_lanes(lanes)
        if pages is not None:
            for lane in np.unique(lanes):
                at = np.flatnonzero(lanes == lane)
                pages[at] = in_pieces(pages[at], lengths, rng)
        return pages

    def scattered_host(pages: int) -> PageArray | None:
        taken = take(pages)
        return None if taken is None else in_pieces(taken, lengths, host_rng)

    slots.alloc_lanes, host.take = scattered_lanes, scattered_host


def in_pieces(pages: PageArray, lengths: Sequence[int], rng: np.random.Generator) -> PageArray:
    """`pages` cut into pieces of random `lengths`, in random order."""
    if tuple(lengths) == (1,):
        return rng.permutation(pages)  # takes no part of what is timed around it
    cuts = np.cumsum(rng.choice(lengths, size=len(pages)))
    pieces = np.split(pages, cuts[cuts < len(pages)])
    return np.concatenate([pieces[at] for at in rng.permutation(len(pieces))])


class Link:
    """The pinned-copy ceiling: one copy of 1 GiB each way."""

    def __init__(self, size: int = 1 << 30) -> None:
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True).random_(0, 255)
        self._device = torch.empty(size, dtype=torch.uint8, device="cuda").random_(0, 255)

    def measure(self, *, to_device: bool) -> float:
        """GB/s, without the time that the thread takes to submit the copy."""
        before, after = timing_event(), timing_event()
        target, source = (self._device, self._host) if to_device else (self._host, self._device)
        torch.cuda.synchronize()
        keep_busy(1.0)
        before.record()
        target.copy_(source, non_blocking=True)
        after.record()
        torch.cuda.synchronize()
        milliseconds: float = before.elapsed_time(after)
        return self._host.nbytes / milliseconds / 1e6


def keep_busy(milliseconds: float) -> None:
    """Give the current stream something to do for about so long (a little longer where the clock is below 2 GHz)."""
    torch.cuda._sleep(int(milliseconds * 2e6))  # type: ignore[no-untyped-call]  # noqa: SLF001  # torch has no other


def timing_event() -> Any:  # noqa: ANN401  # torch leaves its events untyped
    """A CUDA event that keeps the time."""
    event_type: Any = torch.cuda.Event
    return event_type(enable_timing=True)


class Results:
    """A JSON file that is complete after each change, so that nothing is lost if a later case fails."""

    def __init__(self, name: str) -> None:
        folder = Path(os.environ.get("OUT") or ".")
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / name
        self.data: dict[str, Any] = {
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
        }

    def save(self) -> None:
        """Write the file."""
        self._path.write_text(json.dumps(self.data, indent=1), encoding="utf-8")


@contextmanager
def synchronisation_forbidden() -> Iterator[None]:
    """Within, whatever makes the calling thread wait for the device raises, as far as torch can tell."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def table(title: str, columns: list[str], rows: list[list[str]]) -> str:
    """Plain text."""
    widths = [max(len(row[at]) for row in [columns, *rows]) for at in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [columns, *rows]]
    return "\n".join([title, *lines])
