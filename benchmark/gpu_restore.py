"""How long one rank takes to restore a long prefix of a GLM-5-like model, for several shard counts.

The model's cache: 78 layers of DSA rows (656 bytes, fp8) and index keys (132 bytes) a token. A prefix of 725,000
tokens (in whole pages: 724,992) is written, backed up, evicted and overwritten, and brought back by the real tree and
controller of rank 0 of N; its peers would do the same on their own GPU and link at once. If a rank's share does not
fit this machine, fewer layers are moved and the seconds scaled by bytes; the table says so. The floor is the bytes
over the pinned-copy ceiling measured just before.

    python3 benchmark/gpu_restore.py [--shards 8,4,2,1] [--rounds 5] [--host-gib 90] [--sglang]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import threading
import time
import traceback
from array import array
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import psutil
import torch
from gpu_common import (
    PAGE_SIZE,
    Link,
    PageContent,
    Results,
    make_device_pool,
    poison,
    run_beside_the_gpu,
    scatter,
    synchronisation_forbidden,
    table,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang.srt.mem_cache.hicache.assemble import assemble_cache
from sglang.srt.mem_cache.hicache.copies.transfer import HostTransfer
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.settings import HiCacheSettings, ShardGroup
from sglang.srt.mem_cache.hicache.slots.allocator import LaneSlotAllocator
from sglang.srt.mem_cache.hicache.tree.calls import Insertion
from sglang.srt.mem_cache.layouts import GroupKind, LayoutConfig, create_layout
from sglang.srt.mem_cache.layouts.pages import pages_of_tokens
from sglang.srt.mem_cache.layouts.rounding import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from sglang.srt.mem_cache.hicache.agreement import Agreement
    from sglang.srt.mem_cache.hicache.radix_cache import HiRadixCache
    from sglang.srt.mem_cache.layouts.pages import PageArray

Turn: TypeAlias = "Callable[[], AbstractContextManager[None]]"

MODEL_LAYERS = 78
PREFIX_PAGES = 725_000 // PAGE_SIZE
BYTES_PER_TOKEN_AND_LAYER = 656 + 132
POOL = "dsa_fp8"
RESERVE_BYTES = 12 << 30


class Alone:
    """The agreement of a rank whose peers are not there: they would all say the same."""

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        """The values."""
        return tuple(values)

    def capacity(self, value: int) -> int:
        """See `Agreement`."""
        return value


class Restore:
    """Rank `rank` of `shards`, with the whole prefix in its tree and its own share of the rows.

    Its peers are not asked, unless `agreement` does.
    """

    def __init__(
        self, *, shards: int, layers: int, scattered: bool, rank: int = 0, agreement: Agreement | None = None
    ) -> None:
        self.layers = layers
        self.rng = np.random.default_rng(5)
        own_pages = ceil_div(PREFIX_PAGES, shards)
        self.device_pool = make_device_pool(POOL, pages=own_pages, layers=layers)
        self.content = PageContent(self.device_pool)
        self.layout = create_layout(
            LayoutConfig(
                name="cp_shared" if shards > 1 else "identity",
                page_size=PAGE_SIZE,
                shard_size=shards,
                shard_rank=rank,
            )
        )
        self.allocator = LaneSlotAllocator(
            layout=self.layout,
            physical_size=own_pages * PAGE_SIZE,
            dtype=self.device_pool.dtype,
            device="cuda",
            kvcache=self.device_pool,
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE_SIZE,
            eviction_policy="lru",
        )
        self.cache: HiRadixCache[Any] = assemble_cache(
            params,
            layout=self.layout,
            settings=HiCacheSettings(io_backend="kernel", mem_layout="layer_first", host_ratio=1.0),
            group=ShardGroup(kind=GroupKind.ATTENTION_CP if shards > 1 else GroupKind.SINGLE, size=shards, rank=rank),
            agreement=agreement or Alone(),
        )
        self.tokens = array("q", self.rng.integers(0, 150_000, size=PREFIX_PAGES * PAGE_SIZE).tolist())
        self.keys = torch.from_numpy(self.rng.integers(-(2**62), 2**62, size=PREFIX_PAGES))
        if scattered:
            scatter(self.cache, self.rng)

    def back_up(self) -> tuple[float, float]:
        """Write the rows and insert the chain. Returns the backup's seconds on the device and the insert's ms."""
        base = self.layout.chain_base(self.tokens[:PAGE_SIZE].tobytes(), "")
        pages = self.cache.alloc_slots(self.layout.extend_lanes(base, 0, PREFIX_PAGES))
        if pages is None:
            raise RuntimeError("the prefix does not fit the device pool")
        self.content.write(*self._own(pages))
        value = self.cache.slots.slots(pages)
        key = RadixKey(self.tokens)
        torch.cuda.synchronize()
        started = time.perf_counter()
        with synchronisation_forbidden():
            self.cache.put(Insertion(key=key, value=value, slot_pages=pages))
            self.cache.parts.transfers.submit_backups()
        inserted = time.perf_counter() - started
        torch.cuda.synchronize()
        ack = self.cache.cache_controller.ack_write_queue[-1]
        seconds = ack.start_event.elapsed_time(ack.finish_event) / 1e3
        self.cache.check_hicache_events()
        return seconds, inserted * 1e3

    def load(self, *, verify: bool, in_turn: Turn = nullcontext) -> dict[str, float]:
        """Evict, overwrite, load back. Seconds on the device, of the calling thread, and to the first layer.

        The copies are submitted and end within ``in_turn()``.
        """
        self.cache.evict(EvictParams(num_tokens=self.allocator.size))
        if verify:
            poison(self.device_pool)
        torch.cuda.synchronize()
        started = time.perf_counter()
        match = self.cache.match(RadixKey(self.tokens))
        loaded, _ = self.cache.bring_back(match.host_node)
        planned = time.perf_counter()
        controller = self.cache.cache_controller
        with in_turn():
            begun = time.perf_counter()
            with synchronisation_forbidden():
                index = self.cache.ready_to_load_host_cache()
            submitted = time.perf_counter()
            controller.layer_done_counter.events[index].load_events[0].synchronize()
            first = time.perf_counter()
            torch.cuda.synchronize()
            ended = time.perf_counter()
        ack = controller.ack_load_queue[-1]
        seconds = ack.start_event.elapsed_time(ack.finish_event) / 1e3
        moved = ack.num_bytes
        self.cache.check_hicache_events()
        wrong = 0
        if verify:
            wrong = self.content.wrong_pages(*self._own(pages_of_tokens(loaded, PAGE_SIZE)))
        if wrong or len(loaded) != len(self.tokens):
            raise RuntimeError(f"{wrong} pages have wrong bytes; {len(loaded)} of {len(self.tokens)} tokens loaded")
        return {
            "copy_s": seconds,
            "wall_s": planned - started + ended - begun,
            "match_and_plan_s": planned - started,
            "submit_s": submitted - begun,
            "first_layer_s": planned - started + first - begun,
            "bytes": moved,
        }

    def use_sglangs_engine(self) -> None:
        """From now on copies are SGLang's own."""
        controller = self.cache.cache_controller
        controller.transfer = HostTransfer(
            host_pool=controller.mem_pool_host, device_pool=self.device_pool, io_backend="kernel", copier=False
        )

    def _own(self, pages: PageArray) -> tuple[torch.Tensor, torch.Tensor]:
        plan = self.layout.plan_backup(pages)
        owned = torch.from_numpy(plan.lanes == self.layout.lane)
        return torch.from_numpy(plan.device_pages).cuda(), self.keys[owned].cuda()


def grow_memory(gib: float) -> None:
    """Touch `gib` of memory and give it back: some virtual machines get their memory only as it is used."""
    if psutil.virtual_memory().total >= gib * 2**30 + RESERVE_BYTES:
        return

    def touch(share: int) -> None:
        block = np.empty(share, dtype=np.uint8)
        block[::4096] = 1

    threads = [threading.Thread(target=touch, args=(int(gib * 2**30 / 8),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def layers_that_fit(shards: int) -> int:
    """Layers of a rank's share that host and device have room for."""
    own_tokens = ceil_div(PREFIX_PAGES, shards) * PAGE_SIZE
    host = psutil.virtual_memory().available - RESERVE_BYTES
    device = torch.cuda.mem_get_info()[0] - (4 << 30)
    return max(1, min(MODEL_LAYERS, int(min(host, device) / (own_tokens * BYTES_PER_TOKEN_AND_LAYER * 1.01))))


def measure(shards: int, scattered: bool, arguments: argparse.Namespace, link: Link) -> list[dict[str, Any]]:
    """One shard count and page order: ours, and SGLang's engine if asked for."""
    layers = layers_that_fit(shards)
    restore = Restore(shards=shards, layers=layers, scattered=scattered)
    records: list[dict[str, Any]] = []
    try:
        backup_s, insert_ms = restore.back_up()
        for engine in ("ours", "SGLang") if arguments.sglang else ("ours",):
            if engine == "SGLang":
                restore.use_sglangs_engine()
            restore.load(verify=True)
            ceilings: list[float] = []
            rounds: list[dict[str, float]] = []
            for _ in range(arguments.rounds):
                ceilings.append(link.measure(to_device=True))
                rounds.append(restore.load(verify=False))
            ceiling = statistics.median(ceilings)
            middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
            scale = MODEL_LAYERS / layers
            floor_s = middle["bytes"] * scale / ceiling / 1e9
            records.append(
                {
                    "shards": shards,
                    "engine": engine,
                    "order": "random pages" if scattered else "as allocated",
                    "layers": layers,
                    "scaled_by": scale,
                    "gib_per_rank": middle["bytes"] * scale / 2**30,
                    "ceiling_gb_per_s": ceiling,
                    "floor_s": floor_s,
                    "restore_s": middle["copy_s"] * scale,
                    "share": floor_s / (middle["copy_s"] * scale),
                    "backup_s": backup_s * scale,
                    "insert_ms": insert_ms,
                    "rounds": rounds,
                    **{name: value for name, value in middle.items() if name not in ("bytes", "copy_s")},
                }
            )
    finally:
        restore.cache.release_host_resources()
    return records


def main() -> None:
    """All shard counts, fewest bytes first; each result is saved at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", default="8,4,2,1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host-gib", type=float, default=60, help="host memory to claim for the largest share")
    parser.add_argument("--sglang", action="store_true", help="also load with SGLang's engine")
    arguments = parser.parse_args()
    results = Results("gpu_restore.json")
    started = time.perf_counter()
    run_beside_the_gpu()
    grow_memory(arguments.host_gib)
    memory = psutil.virtual_memory()
    took = time.perf_counter() - started
    print(f"host memory {memory.total >> 30} GiB, {memory.available >> 30} available, {took:.0f} s", flush=True)
    link = Link()
    records: list[dict[str, Any]] = []
    with standalone_runtime(device="cuda", page_size=PAGE_SIZE, hicache_io_backend="kernel"):
        for shards in [int(count) for count in arguments.shards.split(",")]:
            for scattered in (False, True):
                started = time.perf_counter()
                try:
                    records += measure(shards, scattered, arguments, link)
                except Exception:
                    print(f"FAILED {shards} shards, scattered {scattered}:\n{traceback.format_exc()}", flush=True)
                gc.collect()
                torch.cuda.empty_cache()
                results.data["measurements"] = records
                results.save()
                print(f"{shards} shards, scattered {scattered}: {time.perf_counter() - started:.0f} s", flush=True)
    print(
        table(
            f"Restore of {PREFIX_PAGES * PAGE_SIZE:,} tokens, {MODEL_LAYERS} layers; times are for all layers",
            ["shards", "engine", "order", "layers moved", "GiB a rank", "ceiling GB/s", "floor s", "restore s",
             "of ceiling", "submit ms", "match+plan ms"],
            [
                [str(one["shards"]), one["engine"], one["order"], f"{one['layers']} (x{one['scaled_by']:.2f})",
                 f"{one['gib_per_rank']:.2f}", f"{one['ceiling_gb_per_s']:.1f}", f"{one['floor_s']:.3f}",
                 f"{one['restore_s']:.3f}", f"{one['share']:.1%}", f"{one['submit_s'] * 1e3:.2f}",
                 f"{one['match_and_plan_s'] * 1e3:.1f}"]
                for one in records
            ],
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
