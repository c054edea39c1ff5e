"""A server for each row of the table of refusals, and one that suits every strategy."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

from sglang.srt.arg_groups.model_override_base import resolving_view

from sglang.srt.mem_cache.hicache.seam.server_flags import FIELDS
from sglang.srt.mem_cache.hicache.server.facts import ModelFacts, ServerFacts

sglang_args: Any = import_module("sglang.srt.server_args")  # records of 500 fields: not in our stubs
MLA = ModelFacts()

# For each row of the table, a server that it is about: fields of ServerArgs, and what differs from an MLA model.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a launch without --enable-hierarchical-cache": ({"enable_hierarchical_cache": False}, {}),
    "--disable-radix-cache": ({"disable_radix_cache": True}, {}),
    "another --radix-cache-backend": ({"radix_cache_backend": "flexkv"}, {}),
    "--hicache-storage-backend": ({"hicache_storage_backend": "file"}, {}),
    "--hicache-host-memory-mode buffer_only": ({"hicache_host_memory_mode": "buffer_only"}, {}),
    "--hicache-io-backend kernel without a GPU": ({"hicache_io_backend": "kernel"}, {}),
    "--enable-hisparse": ({"enable_hisparse": True}, {}),
    "--enable-lmcache": ({"enable_lmcache": True}, {}),
    "--enable-flexkv": ({"enable_flexkv": True}, {}),
    "--enable-unified-cache-external-linker": ({"enable_unified_cache_external_linker": True}, {}),
    "--enable-session-radix-cache": ({"enable_session_radix_cache": True}, {}),
    "--enable-streaming-session": ({"enable_streaming_session": True}, {}),
    "--radix-eviction-policy tlru": ({"radix_eviction_policy": "tlru"}, {}),
    "--kv-canary": ({"kv_canary": "log"}, {}),
    "--enable-kv-cache-sharding": ({"enable_kv_cache_sharding": True}, {}),
    "--enable-unified-memory": ({"enable_unified_memory": True}, {}),
    "--enable-page-major-kv-layout": ({"enable_page_major_kv_layout": True}, {}),
    "--prefill-only-disable-kv-cache": ({"prefill_only_disable_kv_cache": True}, {}),
    "--kv-cache-dtype nvfp4, fp4_mx_block16 or mxfp8": ({"kv_cache_dtype": "nvfp4"}, {}),
    "--dcp-size above 1": ({"dcp_size": 2}, {}),
    "--speculative-algorithm": ({"speculative_algorithm": "EAGLE"}, {}),
    "--decoupled-spec-role": ({"decoupled_spec_role": "verifier"}, {}),
    "--dllm-algorithm": ({"dllm_algorithm": "LowConfidence"}, {}),
    "--disaggregation-mode prefill or decode": ({"disaggregation_mode": "prefill"}, {}),
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": ({}, {"pool_shrinks": True}),
    "a model with sliding-window layers": ({}, {"model": replace(MLA, is_hybrid_swa=True)}),
    "a model with recurrent layers (Mamba, linear attention)": ({}, {"model": replace(MLA, is_recurrent=True)}),
    "a model without latent KV (MHA, GQA)": ({}, {"model": replace(MLA, is_mla=False)}),
    "a model with sparse attention (DSA) without an NVIDIA GPU": ({}, {"model": replace(MLA, is_dsa=True)}),
    "a model with index keys beside KV heads (MiniMax-M3, QSA)": ({}, {"model": replace(MLA, indexes_heads=True)}),
    "a model with pooled index keys (index_kpool above 1)": ({}, {"model": replace(MLA, index_kpool=4)}),
    "--page-size 1": ({"page_size": 1}, {}),
    "several attention groups (--attn-dp-size, or --dp-size with --enable-dp-attention)": (
        {"enable_dp_attention": True, "dp_size": 2},
        {},
    ),
    "--pp-size above 1": ({"pp_size": 2}, {}),
    "--elastic-ep-backend": ({"elastic_ep_backend": "mooncake"}, {}),
    "--enable-two-batch-overlap": ({"enable_two_batch_overlap": True}, {}),
    "--enable-pdmux": ({"enable_pdmux": True}, {}),
    "--enable-dsa-cache-layer-split": ({"enable_dsa_cache_layer_split": True}, {}),
    "--cuda-graph-backend-decode, --cuda-graph-backend-prefill or --cuda-graph-config that asks for graphs": (
        {},
        {"graphs_on": True, "graphs_asked_for": True},
    ),
    "--enable-torch-compile without a GPU": ({"enable_torch_compile": True}, {}),
    "CUDA graphs": ({}, {"graphs_on": True}),
    "an attention backend other than torch_native and triton": ({"attention_backend": "fa3"}, {}),
    "--attention-context-parallel-size above 1": ({"attn_cp_size": 2}, {}),
}
GOOD: dict[str, Any] = {
    "model_path": "none",
    "enable_hierarchical_cache": True,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_ratio": 2.0,
    "page_size": 64,
    "tp_size": 2,
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
}


def make_facts(fields: dict[str, Any], changes: dict[str, Any]) -> ServerFacts:
    """A server that suits every strategy, with `fields` of ServerArgs and other facts changed."""
    record = sglang_args.ServerArgs(**{**GOOD, **fields})
    record.resolve_once()
    facts: dict[str, Any] = {"args": resolving_view(record), "model": MLA, "shard_size": 2, "on_cpu": True, **changes}
    return ServerFacts(**facts)


def is_known(fields: dict[str, Any]) -> bool:
    """Whether the installed release has all of these fields."""
    return fields.keys() <= FIELDS
