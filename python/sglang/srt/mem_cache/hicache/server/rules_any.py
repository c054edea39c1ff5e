"""Settings that do not go together with any layout strategy."""

from __future__ import annotations

from typing import Final

from .choice import RADIX_BACKEND
from .rule import Rule, is_above_one, is_set, is_set_here

RULES_FOR_ANY: Final[tuple[Rule, ...]] = (
    Rule(
        setting="a launch without --enable-hierarchical-cache",
        applies=lambda facts: not facts.args.enable_hierarchical_cache,
        why="a layout strategy places the pages of the hierarchical cache",
        remedy="add --enable-hierarchical-cache",
    ),
    Rule(
        setting="--disable-radix-cache",
        applies=is_set("disable_radix_cache"),
        why="there is no cache whose pages could be placed",
        remedy="drop one of the two",
    ),
    Rule(
        setting="another --radix-cache-backend",
        applies=lambda facts: facts.args.radix_cache_backend not in (None, RADIX_BACKEND),
        why="the strategy comes with a cache of its own",
        remedy="drop --radix-cache-backend",
    ),
    Rule(
        setting="--hicache-storage-backend",
        applies=lambda facts: facts.args.hicache_storage_backend is not None,
        why="there is no storage tier below the host yet",
        remedy="drop --hicache-storage-backend",
    ),
    Rule(
        setting="--hicache-host-memory-mode buffer_only",
        applies=lambda facts: facts.args.hicache_host_memory_mode == "buffer_only",
        why="that mode keeps host memory for a storage tier",
        remedy="use --hicache-host-memory-mode cache",
    ),
    Rule(
        setting="--hicache-io-backend kernel without a GPU",
        applies=lambda facts: facts.on_cpu and facts.args.hicache_io_backend == "kernel",
        why="the copy kernels need CUDA, and kernel is SGLang's default",
        remedy="use --hicache-io-backend direct",
    ),
    Rule(
        setting="--enable-hisparse",
        applies=is_set("enable_hisparse"),
        why="its pool keeps part of the KV elsewhere",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--enable-lmcache",
        applies=is_set("enable_lmcache"),
        why="LMCache replaces the hierarchical cache",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--enable-flexkv",
        applies=is_set("enable_flexkv"),
        why="FlexKV replaces the hierarchical cache",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--enable-unified-cache-external-linker",
        applies=is_set("enable_unified_cache_external_linker"),
        why="the linker belongs to SGLang's unified tree",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--enable-session-radix-cache",
        applies=is_set("enable_session_radix_cache"),
        why="sessions belong to SGLang's unified tree",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--enable-streaming-session",
        applies=is_set("enable_streaming_session"),
        why="a session keeps slots between its requests, which SGLang's unified tree alone accounts for",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--radix-eviction-policy tlru",
        applies=lambda facts: facts.args.radix_eviction_policy == "tlru",
        why="it reads lengths that only nodes of SGLang's unified tree have",
        remedy="use --radix-eviction-policy lru, lfu, slru or priority",
    ),
    Rule(
        setting="--kv-canary",
        applies=lambda facts: facts.args.kv_canary != "none",
        why="its sweeps walk SGLang's unified tree only",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--enable-kv-cache-sharding",
        applies=is_set_here("enable_kv_cache_sharding"),
        why="both would say which rank keeps a page",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--enable-unified-memory",
        applies=is_set("enable_unified_memory"),
        why="its pools share one buffer whose pages the host tier cannot describe",
        remedy="drop --enable-unified-memory",
    ),
    Rule(
        setting="--enable-page-major-kv-layout",
        applies=is_set("enable_page_major_kv_layout"),
        why="its rows lie in an order that the host tier cannot describe",
        remedy="drop --enable-page-major-kv-layout",
    ),
    Rule(
        setting="--prefill-only-disable-kv-cache",
        applies=is_set("prefill_only_disable_kv_cache"),
        why="there is no KV to keep",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--kv-cache-dtype nvfp4, fp4_mx_block16 or mxfp8",
        applies=lambda facts: "fp4" in facts.args.kv_cache_dtype or facts.args.kv_cache_dtype == "mxfp8",
        why="scales lie beside the rows and would be lost on the host",
        remedy="use --kv-cache-dtype auto or fp8_e4m3",
    ),
    Rule(
        setting="--dcp-size above 1",
        applies=is_above_one("dcp_size"),
        why="decode context parallelism shares pages out in its own way",
        remedy="use --dcp-size 1",
    ),
    Rule(
        setting="--speculative-algorithm",
        applies=is_set("speculative_algorithm"),
        why="the draft model's pool is not served",
        remedy="drop --speculative-algorithm",
    ),
    Rule(
        setting="--decoupled-spec-role",
        applies=lambda facts: facts.args.decoupled_spec_role != "null",
        why="the draft model's pool is not served",
        remedy="drop --decoupled-spec-role",
    ),
    Rule(
        setting="--dllm-algorithm",
        applies=is_set("dllm_algorithm"),
        why="diffusion models reuse slots within a request",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--disaggregation-mode prefill or decode",
        applies=lambda facts: facts.args.disaggregation_mode != "null",
        why="the transfer addresses pools by slot",
        remedy="use --disaggregation-mode null",
    ),
    Rule(
        setting="SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
        applies=lambda facts: facts.pool_shrinks,
        why="slots are counted before the pool shrinks",
        remedy="unset it",
    ),
    Rule(
        setting="a model with sliding-window layers",
        applies=lambda facts: facts.model.is_hybrid_swa,
        why="its pools have two kinds of pages",
        remedy="use a model with full attention, or drop the strategy",
    ),
    Rule(
        setting="a model with recurrent layers (Mamba, linear attention)",
        applies=lambda facts: facts.model.is_recurrent,
        why="its state belongs to requests, not to pages",
        remedy="use a model with attention only, or drop the strategy",
    ),
    Rule(
        setting="a model with index keys beside KV heads (MiniMax-M3, QSA)",
        applies=lambda facts: facts.model.indexes_heads,
        why="its pool holds more than a row a token, and the host tier cannot describe that",
        remedy="use a model with full attention or an MLA model with DSA, or drop the strategy",
    ),
    Rule(
        setting="a model with pooled index keys (index_kpool above 1)",
        applies=lambda facts: facts.model.index_kpool > 1,
        why="the keys of unfinished pools belong to requests, not to pages",
        remedy="use a model with an index key a token, such as DeepSeek-V3.2 or GLM-5, or drop the strategy",
    ),
)
