"""SGLang's own DSA kernels on pools that two ranks share, compared with one pool that stores everything.

Each rank is a process, on a GPU of its own (NCCL) or on the same one (gloo). Keys are stored by the methods of SGLang's
indexer, with our hooks on them and on a stream of their own, in every way that this installation has kernels for; KV
by the pool's setter. The forward passes are a prefill that ends in the middle of a page, a chunk from there on, decode
steps over two sequences, a backup, and a load into other pages while the pass that reads them has already begun. After
each layer, what SGLang's kernels read is compared with SGLang's own pool, and at the end every stored page is. One line
a case; the exit status is 1 if anything differs.

    python3 benchmark/gpu_dsa_shared.py [--only fp8] [--corrupt]
    python3 benchmark/gpu_dsa_shared.py --device cpu        # the Triton kernels under Triton's interpreter, minutes
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_common import page_views, synchronisation_forbidden
from typing_extensions import override

from sglang.srt.mem_cache.hicache.copies.transfer import HostTransfer
from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
from sglang.srt.mem_cache.hicache.device.page_reader import SharedPages, group_sum
from sglang.srt.mem_cache.hicache.device.pools import DsaGeometry, build_device_pool
from sglang.srt.mem_cache.hicache.device.shared_pools import LayoutDSATokenToKVPool
from sglang.srt.mem_cache.hicache.host.pools import build_host_pool, release_host_pool
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.layouts import CpSharedLayout, PoolKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    from sglang.srt.mem_cache.hicache.host.pools import AnyHostPool

RANKS = 2
PAGE = 64
WIDTH = 128
ROPE = 64
LAYERS = 3
ROW_PAGES = 6  # on each rank
PATIENCE = {"cuda": timedelta(seconds=120), "cpu": timedelta(seconds=600)}
UNREAD_LAYER = 1  # stores keys that no kernel reads, as in a short prefill
COUNTER: Any = import_module("sglang.srt.managers.cache_controller").LayerDoneCounter
INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """KV ``bf16`` or ``fp8`` (packed rows of 656 bytes), and the way in which index keys are stored."""

    kv: str
    way: str

    @override
    def __str__(self) -> str:
        return f"{self.kv} KV, {self.way}"


class BareIndexer:
    """The methods of SGLang's indexer that store keys, with the weights that they look at."""

    def __init__(self, device: str) -> None:
        self.module: Any = import_module(INDEXER)
        generator = torch.Generator().manual_seed(3)
        weight, bias = torch.rand(2, WIDTH, generator=generator).to(device).unbind()
        self.k_norm = SimpleNamespace(weight=weight, bias=bias, variance_epsilon=1e-6)
        self._indexer_cos_sin_cache = torch.rand(8192, ROPE, generator=generator).to(device)
        self.block_size, self.scale_fmt = WIDTH, None
        self.act_quant: Any = import_module("sglang.kernels.ops.attention.dsa.triton_kernel").act_quant

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # a method of SGLang's
        return getattr(self.module.Indexer, name).__get__(self)

    def store(self, way: str, batch: Any, layer: int, keys: torch.Tensor) -> None:  # noqa: ANN401  # a forward batch
        """Store ``[tokens, 128]`` bfloat16 keys at the slots of `batch`."""
        with self._kernels(way):
            if way.startswith("norm"):
                self._fused_k_prepare_and_store(keys, batch.positions, batch, layer, self.act_quant)
            else:
                self._store_index_k_cache(forward_batch=batch, layer_id=layer, key=keys, act_quant=self.act_quant)

    def read(self, pool: DSATokenToKVPool, layer: int) -> torch.Tensor:
        """What SGLang's indexer hands to its kernels for decoding."""
        pages: torch.Tensor = self._get_index_k_read_buffer.__func__(pool, layer)
        return pages

    def missing(self, way: str) -> str:
        """Why this installation has no kernels for a way of storing; empty if it has."""
        if way == "Triton":
            return ""
        if not self.module._is_cuda:  # noqa: SLF001  # SGLang's own switch
            return "needs CUDA"
        if "JIT" in way and not self.module.can_use_dsa_fused_store(torch.bfloat16, torch.int64, PAGE):
            return "SGLang's JIT kernel cannot be compiled here"
        return ""

    @contextmanager
    def _kernels(self, way: str) -> Iterator[None]:
        """SGLang prefers its JIT kernels; without them it stores with Triton."""
        preferred = self.module.can_use_dsa_fused_store
        if "Triton" in way:
            self.module.can_use_dsa_fused_store = lambda *_: False
        try:
            yield
        finally:
            self.module.can_use_dsa_fused_store = preferred


WAYS = ("Triton", "JIT store", "norm, rotate and store in one JIT kernel", "norm and rotate by JIT, store by Triton")


class Rank:
    """One rank's shared pool, and a pool of SGLang's own with all pages."""

    def __init__(self, case: Case, number: int, group: dist.ProcessGroup, device: str, *, corrupt: bool) -> None:
        self.case, self.number, self.device, self.corrupt = case, number, device, corrupt
        self.indexer = BareIndexer(device)
        geometry = DsaGeometry(dtype=torch.float8_e4m3fn if case.kv == "fp8" else torch.bfloat16)
        tokens = (ROW_PAGES + 1) * RANKS * PAGE
        self.whole: Any = build_device_pool(
            PoolKind.DSA, tokens=tokens, page_size=PAGE, layers=LAYERS, device=device, geometry=geometry
        )
        self.pool = LayoutDSATokenToKVPool(
            size=ROW_PAGES * PAGE,
            page_size=PAGE,
            dtype=geometry.dtype,
            kv_lora_rank=geometry.kv_lora_rank,
            qk_rope_head_dim=geometry.qk_rope_head_dim,
            index_head_dim=geometry.index_head_dim,
            kv_cache_dim=geometry.kv_cache_dim,
            layer_num=LAYERS,
            device=device,
            enable_memory_saver=False,
        )
        self.layout = CpSharedLayout(page_size=PAGE, shard_size=RANKS, shard_rank=number)
        self.pool.access = SharedPages(self.layout, page_size=PAGE, lane_count=RANKS, reduce=group_sum(group))
        self.generator = torch.Generator().manual_seed(5)  # the same tokens on all ranks
        cuda: Any = torch.cuda  # torch leaves its streams untyped
        self.side = cuda.Stream() if device != "cpu" else None
        self.host: AnyHostPool | None = None
        self.problems: list[str] = []
        self.compared_bytes = 0

    def forward(self, what: str, pages: list[int], slots: torch.Tensor, *, check: bool = True) -> None:
        """Compute the tokens of `slots`; `pages` are those of all sequences of the batch."""
        slots = slots.to(self.device)
        batch = SimpleNamespace(out_cache_loc=slots, positions=torch.arange(len(slots), device=self.device))
        inputs = [self._inputs(len(slots)) for _ in range(LAYERS)]
        table = torch.tensor(pages, device=self.device)
        seen: list[Any] = []
        watched = check and dist.get_backend() == "nccl"  # gloo waits for the device
        with synchronisation_forbidden() if watched else nullcontext():
            self.pool.access.begin_batch(lambda: table)
            for layer, (keys, latent, rotary) in enumerate(inputs):
                for pool in (self.whole, self.pool):
                    with serving(pool), self._beside():
                        self.indexer.store(self.case.way, batch, layer, keys)
                    pool.set_mla_kv_buffer(at_layer(layer), slots, latent, rotary)
                if self.corrupt and what == "chunk" and self.number == 1:
                    self.pool.index_k_with_scale_buffer[layer][pages[0] // RANKS, 7] ^= 1
                if layer != UNREAD_LAYER or what == "another turn":
                    seen.append((layer, *(self._read(pool, layer, table) for pool in (self.whole, self.pool))))
        for layer, expected, found in seen:
            for name, right in expected.items():
                self._expect_equal(f"{what}, layer {layer}, {name}", right, found[name])

    def _inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        widths = (WIDTH, 512, ROPE)
        parts = [torch.randn(tokens, width, generator=self.generator) for width in widths]
        keys, latent, rotary = (part.to(torch.bfloat16).to(self.device) for part in parts)
        return keys, latent.unsqueeze(1), rotary.unsqueeze(1)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """SGLang stores keys on a stream beside that of the queries."""
        if self.side is None:
            yield
            return
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            yield
        current.wait_stream(self.side)

    def _read(self, pool: DSATokenToKVPool, layer: int, table: torch.Tensor) -> dict[str, torch.Tensor]:
        """What kernels get: pages for decoding, keys and scales of a prefill, KV rows in the form of each backend."""
        lengths = torch.full((1,), len(table) * PAGE, dtype=torch.int32).to(self.device, non_blocking=True)
        count = len(table) * PAGE
        buffers: Any = pool
        keys, scales = buffers.get_index_k_scale_buffer(layer, lengths, table.to(torch.int32)[None], count, count)
        slots = (table[:, None] * PAGE + torch.arange(PAGE, device=self.device)).reshape(-1)
        rows = pool.get_key_buffer(layer)
        read = {
            "index pages": self.indexer.read(pool, layer)[table],
            "keys by GetKAndS": keys,
            "scales by GetKAndS": scales,
            "KV rows": rows.view(torch.uint8)[slots],
        }
        if self.case.kv == "fp8" and (self.device != "cpu" or self.host is not None):  # slow under the interpreter
            dequantise: Any = import_module("sglang.kernels.ops.attention.dsa.dequant_k_cache").dequantize_k_cache_paged
            read["KV by dequantize_k_cache_paged"] = dequantise(rows, slots.to(torch.int32))
        if self.case.kv == "bf16":
            latent, rotary = pool.get_mla_kv_buffer(at_layer(layer), slots)
            read |= {"latent by get_mla_kv_buffer": latent, "rotary by get_mla_kv_buffer": rotary}
            if self.device != "cpu":
                read["attention by triton_sparse_mla"] = self._attend(rows, slots)
        return read

    def _attend(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        attend: Any = import_module("sglang.kernels.ops.attention.dsa.triton_sparse_mla").triton_sparse_mla_fwd
        table = slots.to(torch.int32)[None, None, :]
        query = torch.linspace(-1, 1, 16 * 576, device=self.device).to(torch.bfloat16).view(1, 16, 576)
        output: torch.Tensor = attend(query[..., :512], query[..., 512:], rows, table, 0.05, 512)
        return output

    def check_stored(self, pages: list[int]) -> None:
        """Every page lies on its owner and nowhere else."""
        for at, (mine, theirs) in enumerate(zip(page_views(self.pool), page_views(self.whole), strict=True)):
            kept = [page for page in pages if page % RANKS == self.number]
            name = f"buffer {at} as stored"
            self._expect_equal(name, theirs[kept], mine[[page // RANKS for page in kept]])
            rest = sorted(set(range(1, ROW_PAGES + 1)) - {page // RANKS for page in kept})
            self._expect_equal(f"{name}, pages of others", torch.zeros_like(mine[rest]), mine[rest])

    def load_elsewhere(self, old: list[int], new: list[int]) -> None:
        """Back pages up, erase them, and start a load into `new`, a layer at a time, for the next pass to wait for."""
        self.host = build_host_pool(self.pool, page_size=PAGE, mem_layout="layer_first")
        backend = "direct" if self.device == "cpu" else "kernel"
        transfer = HostTransfer(host_pool=self.host, device_pool=self.pool, io_backend=backend)
        self.transfer = transfer  # its buffers are in use until the load has ended
        plan = self.layout.plan_backup(np.array(old))
        host_pages = np.arange(plan.owned_pages)
        transfer.back_up(plan.bind(host_pages)).finish_event.synchronize()
        for view in page_views(self.pool):
            view.zero_()
        for view in page_views(self.whole):
            view[new] = view[old]
        counter = COUNTER(LAYERS)
        index = counter.update_producer()
        copies = self.layout.plan_load([self.layout.finish_backup(plan, host_pages)], np.array(new)).copies
        if self.device != "cpu":
            torch.cuda.synchronize()
            cuda: Any = torch.cuda
            with cuda.stream(transfer.engine.host_to_device_stream):
                cuda._sleep(200_000_000)  # noqa: SLF001  # about 0.1 s; torch has no public one
        counter.events[index].start_event.record()
        transfer.load(copies, counter.events[index])
        counter.set_consumer(index)
        waiting: Any = self.pool
        waiting.layer_transfer_counter = counter

    def end(self) -> None:
        """Give host memory back, once no copy needs it."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        if self.host is not None:
            release_host_pool(self.host)

    def run(self) -> None:
        """The whole case."""
        first, second, loaded = [3, 2, 4], [7, 8], [9, 10, 12]
        slots = slots_of(first)
        self.forward("prefill", first[:2], slots[: PAGE + 36], check=False)  # kernels are compiled here
        self.forward("chunk", first, slots[PAGE + 36 : 2 * PAGE + 20])
        other = slots_of(second)
        self.forward("another prefill", second[:1], other[:7])
        for step in range(3):
            new = torch.stack([slots[2 * PAGE + 20 + step], other[7 + step]])
            self.forward(f"decode {step}", [*first, second[0]], new)
        self.forward("padded decode", [*first, second[0]], torch.tensor([int(slots[2 * PAGE + 23]), 0, 0]))
        self.check_stored([*first, second[0]])
        self.load_elsewhere(first, loaded)
        self.forward("another turn", [*loaded, second[1]], other[PAGE : PAGE + 30])
        self.check_stored([*loaded, second[1]])

    def _expect_equal(self, what: str, expected: torch.Tensor, found: torch.Tensor) -> None:
        expected, found = expected.contiguous().view(torch.uint8), found.contiguous().view(torch.uint8)
        self.compared_bytes += expected.numel()
        if wrong := int((expected != found).sum()):
            self.problems.append(f"{what}: {wrong} of {expected.numel()} bytes differ")


@contextmanager
def serving(pool: DSATokenToKVPool) -> Iterator[None]:
    """A forward pass whose pool this is."""
    context: Any = import_module("sglang.srt.model_executor.forward_context")
    with context.forward_context(context.ForwardContext(attn_backend=SimpleNamespace(token_to_kv_pool=pool))):
        yield


def at_layer(layer: int) -> Any:  # noqa: ANN401  # what SGLang calls an attention layer
    """What the pools look at in an attention layer."""
    return SimpleNamespace(layer_id=layer)


def slots_of(pages: list[int]) -> torch.Tensor:
    """All slots of logical pages."""
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)


def apply_hooks() -> str:
    """Put our hooks on SGLang's indexer, as a server would; what is wrong, or nothing."""
    registry: Any = import_module("sglang.srt.plugins.hook_registry").HookRegistry
    table: Any = import_module("sglang.srt.mem_cache.hicache.server.hook_table")
    is_applied: Any = import_module("sglang.srt.mem_cache.hicache.server.hooks")._is_applied  # noqa: SLF001
    hooks = [hook for hook in table.HOOKS if hook.target.startswith(INDEXER)]
    for hook in hooks:
        registry.register(hook.target, hook.function, hook.kind)
    registry.apply_hooks()
    missing = [hook.target for hook in hooks if not is_applied(hook)]
    return f"not hooked: {', '.join(missing) or INDEXER}" if missing or not hooks else ""


def run_case(case: Case, number: int, group: dist.ProcessGroup, device: str, corrupt: bool) -> tuple[list[str], int]:
    """What this rank found wrong, and the bytes that it compared."""
    rank = None
    settings = {"page_size": PAGE, "hicache_io_backend": "direct" if device == "cpu" else "kernel"}
    try:
        with standalone_runtime(rank=number, world_size=RANKS, device=device, **settings):
            rank = Rank(case, number, group, device, corrupt=corrupt)
            rank.run()
            rank.end()
            problems = rank.problems
    except Exception:
        problems = [*(rank.problems if rank else []), traceback.format_exc()]
    return problems, rank.compared_bytes if rank else 0


def worker(number: int, rendezvous: str, options: argparse.Namespace, failures: Any) -> None:  # noqa: ANN401  # shared
    """Every case, in step with the other rank."""
    torch.set_num_threads(1)
    device = options.device
    if device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())  # "cuda" is this one from here on
    else:
        install_cpu_support()
    nccl = options.device == "cuda" and torch.cuda.device_count() >= RANKS
    reducing = "nccl" if nccl else "gloo"
    meeting, patience = f"file://{rendezvous}", PATIENCE[device]
    dist.init_process_group(reducing, init_method=meeting, rank=number, world_size=RANKS, timeout=patience)
    talk = dist.new_group(backend="gloo", timeout=patience)
    reduce = dist.new_group(backend=reducing, timeout=patience)
    trouble = apply_hooks()
    indexer = BareIndexer(device)
    everyone: list[Any] = [None] * RANKS
    for case in (Case(kv=kv, way=way) for kv in ("bf16", "fp8") for way in WAYS):
        if options.only not in str(case):
            continue
        started = time.perf_counter()
        missing = indexer.missing(case.way)
        mine = ([trouble] if trouble else [], 0)
        if not missing and not trouble:
            mine = run_case(case, number, reduce, device, options.corrupt)
        dist.all_gather_object(everyone, mine, group=talk)
        if number:
            continue
        wrong = [f"rank {at}: {line}" for at, (lines, _) in enumerate(everyone) for line in lines]
        failures.value += bool(wrong)
        state = "FAIL" if wrong else "skip" if missing else "ok  "
        found = missing or f"{sum(count for _, count in everyone):,} bytes compared"
        print(f"{state} {case} ({reducing}): {found}, {time.perf_counter() - started:.1f} s", flush=True)
        for line in wrong[:20]:
            print("     " + line.rstrip().replace("\n", "\n     "), flush=True)
    dist.destroy_process_group()


def main() -> int:
    """Run the cases; 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--corrupt", action="store_true", help="flip a bit on rank 1: every case must fail")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when the ranks import Triton
    spawn: Any = mp
    failures = spawn.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        spawn.spawn(worker, args=(f"{folder}/rendezvous", options, failures), nprocs=RANKS)
    print(f"{failures.value} cases failed")
    return int(failures.value > 0)


if __name__ == "__main__":
    sys.exit(main())
