"""Each field of SGLang's `ServerArgs`, looked at once: what it means to a server with a layout strategy.

A test holds this complete for the installed release: a field without a row fails it, and so does a row whose field no
release has. A refused field has a row in `refusals`, or a check in `values`, that says so to the user.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from .unconcerned import UNCONCERNED, UNCONCERNED_NEWER, UNCONCERNED_OLDER


class Verdict(Enum):
    """What a field means to a layout strategy."""

    SUPPORTED = "works, and is read by us"
    HARMLESS = "works, and changes nothing for us"
    WARNED = "works, with a warning"
    REFUSED = "refused, or some of its values are"


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field: the verdict and the reason."""

    verdict: Verdict
    why: str


def _supported(why: str) -> FieldRow:
    return FieldRow(Verdict.SUPPORTED, why)


def _harmless(why: str) -> FieldRow:
    return FieldRow(Verdict.HARMLESS, why)


def _warned(why: str) -> FieldRow:
    return FieldRow(Verdict.WARNED, why)


def _refused(why: str) -> FieldRow:
    return FieldRow(Verdict.REFUSED, why)


FIELDS: Final[dict[str, FieldRow]] = {
    # The cache and its tiers.
    "enable_hierarchical_cache": _refused("without it there are no pages to place"),
    "disable_radix_cache": _refused("no cache"),
    "radix_cache_backend": _refused("the strategy comes with a cache of its own"),
    "radix_eviction_policy": _refused("tlru needs lengths that our nodes do not have; the others are served"),
    "radix_eviction_policy_config": _supported("judged in the parent by the policy itself"),
    "_radix_eviction_policy_explicitly_set": _harmless("SGLang's note of who chose the policy"),
    "hicache_host_memory_mode": _refused("buffer_only needs a storage tier"),
    "hicache_ratio": _supported("sizes the host tier; judged in the parent and by each rank"),
    "hicache_size": _supported("sizes the host tier; judged in the parent"),
    "hicache_write_policy": _supported("judged in the parent"),
    "hicache_io_backend": _refused("kernel without a GPU"),
    "hicache_mem_layout": _supported("judged in the parent with the way of copying"),
    "hicache_storage_backend": _refused("no storage tier"),
    "enable_unified_cache_external_linker": _refused("belongs to SGLang's unified tree"),
    "enable_hisparse": _refused("keeps part of the KV elsewhere"),
    "enable_lmcache": _refused("replaces the cache"),
    "enable_flexkv": _refused("replaces the cache"),
    "enable_session_radix_cache": _refused("belongs to SGLang's unified tree"),
    "enable_streaming_session": _refused("slots outlive their request; SGLang refuses it late, in the scheduler"),
    "enable_unified_memory": _refused("pools in one buffer"),
    "enable_page_major_kv_layout": _refused("rows in another order"),
    "prefill_only_disable_kv_cache": _refused("no KV"),
    "kv_cache_dtype": _refused("formats whose scales lie beside the rows"),
    "kv_events_config": _supported("our tree publishes its events"),
    "kv_canary": _refused("its sweeps walk SGLang's unified tree only"),
    "kv_canary_real_data": _harmless("only with --kv-canary"),
    "kv_canary_sweep_interval": _harmless("only with --kv-canary"),
    # Pools and memory.
    "page_size": _refused("1 with shared pages"),
    "max_total_tokens": _supported("rows of a rank; judged in the parent"),
    "mem_fraction_static": _harmless("rows of a rank, reckoned by SGLang"),
    "enable_memory_saver": _harmless("SGLang flushes the cache before it releases the pool"),
    "device": _supported("a CPU is a platform of ours; pools of other devices are refused where they are made"),
    "enable_return_routed_experts": _harmless("its rows are counted by slots, as the scheduler's are"),
    "enable_return_indexer_topk": _harmless("its rows are counted by slots, as the scheduler's are"),
    # Ranks and groups.
    "tp_size": _supported("the shard group is reckoned from it"),
    "attn_cp_size": _warned("the shard group, if it has peers; not verified yet"),
    "dp_size": _refused("several attention groups, with shared pages; copies count for host memory"),
    "enable_dp_attention": _refused("several attention groups, with shared pages"),
    "dwdp_size": _harmless("resolved into attention groups, which are judged"),
    "pp_size": _refused("with shared pages"),
    "pp_max_micro_batch_size": _harmless("stages are refused with shared pages; identity has no collective in a batch"),
    "pp_async_batch_depth": _harmless("stages are refused with shared pages; identity has no collective in a batch"),
    "nnodes": _supported("ranks of a machine share its memory"),
    "dcp_size": _refused("shares pages out in its own way"),
    "enable_prefill_cp": _warned("resolved into --attention-context-parallel-size"),
    "cp_strategy": _warned("tokens over ranks within a batch; pages are gathered before attention reads them"),
    "enable_cp_decode_attn_tp": _harmless("divides weights; every rank still reads all pages"),
    "enable_dsa_cache_layer_split": _refused("with shared pages, which share layers out already"),
    "elastic_ep_backend": _refused("with shared pages: a rank that leaves takes its pages along"),
    "elastic_ep_initial_size": _harmless("only with --elastic-ep-backend"),
    "max_ep_size": _harmless("only with --elastic-ep-backend"),
    "ep_join_mode": _harmless("only with --elastic-ep-backend"),
    "ep_join_rank_offset": _harmless("only with --elastic-ep-backend"),
    "enable_dp_attention_local_control_broadcast": _harmless("several attention groups are refused with shared pages"),
    "use_ray": _harmless("the choice travels in the record; a process without the hooks refuses to serve"),
    # Scheduling.
    "disable_overlap_schedule": _harmless("copies wait for streams, not for the scheduler's order"),
    "enable_two_batch_overlap": _refused("with shared pages: gathers in different orders"),
    "enable_single_batch_overlap": _harmless("overlaps experts within a layer; attention keeps its order"),
    "tbo_token_distribution_threshold": _harmless("only with --enable-two-batch-overlap"),
    "enable_pdmux": _refused("with shared pages: gathers in different orders"),
    "pdmux_config_path": _harmless("only with --enable-pdmux"),
    "sm_group_num": _harmless("only with --enable-pdmux"),
    "chunked_prefill_size": _harmless("chunks are put into the tree as requests are"),
    "enable_dynamic_chunking": _harmless("chunks of other sizes"),
    "enable_mixed_chunk": _harmless("one batch, whose pages are gathered together"),
    "num_continuous_decode_steps": _harmless("steps between decisions; each allocates as ever"),
    "retraction_policy": _harmless("which request is retracted; its pages stay in the tree"),
    "enable_priority_scheduling": _supported("nodes keep the priority for the eviction policy of that name"),
    "schedule_policy": _harmless("asks the tree for matches, in an order of its own"),
    "enable_prefix_mm_cache": _harmless("images are tokens to the tree"),
    "enable_mis": _harmless("SGLang asks for no radix cache with it, which is refused"),
    "enable_lora": _harmless("an adapter's name is part of the key"),
    "enable_deterministic_inference": _harmless("how kernels reduce, not what they read"),
    # Kernels that read the pool.
    "attention_backend": _warned("shared pages were verified with two"),
    "prefill_attention_backend": _warned("shared pages were verified with two"),
    "decode_attention_backend": _warned("shared pages were verified with two"),
    "dsa_prefill_backend": _warned("reached by the dsa backend only, which is warned about"),
    "dsa_decode_backend": _warned("reached by the dsa backend only, which is warned about"),
    "enable_lean_attention": _harmless("another schedule of triton's reads, which go through the pool"),
    "flashinfer_mla_disable_ragged": _warned("reached by the flashinfer backend only, which is warned about"),
    "dsa_paged_mqa_logits_backend": _warned("reached by the dsa backend only, which is warned about"),
    "enable_torch_compile": _refused("without a GPU and with shared pages: steps compiled ahead"),
    "enable_torch_compile_debug_mode": _harmless("only with --enable-torch-compile"),
    "torch_compile_max_bs": _harmless("only with --enable-torch-compile"),
    "disable_chunked_prefix_cache": _harmless("whether the prefix is read at once; reads go through the pool"),
    "cuda_graph_config": _refused("graphs asked for, with shared pages"),
    "cuda_graph_backend_decode": _refused("graphs asked for, with shared pages"),
    "cuda_graph_backend_prefill": _refused("graphs asked for, with shared pages"),
    "disable_cuda_graph": _harmless("no graphs"),
    "disable_decode_cuda_graph": _harmless("no graphs"),
    "disable_prefill_cuda_graph": _harmless("no graphs"),
    # Other ways to serve.
    "speculative_algorithm": _refused("the draft's pool is not served"),
    "decoupled_spec_role": _refused("speculation whose draft runs elsewhere"),
    "dllm_algorithm": _refused("slots are used again within a request"),
    "disaggregation_mode": _refused("the transfer addresses pools by slot"),
}
"""Fields that concern the cache and that every supported release has."""

NEWER_FIELDS: Final[dict[str, FieldRow]] = {
    "attn_dp_size": _refused("several attention groups, with shared pages"),
    "enable_kv_cache_sharding": _refused("SGLang's own way of sharing pages out"),
    "hicache_host_memory_fraction": _supported("SGLang fits the ratio to it; judged against that budget"),
    "prefill_decode_interval_min_bs": _harmless("when prompts are admitted"),
    "enable_paged_experts": _harmless("weights on the host, made before the host tier asks what is left"),
    "paged_experts_num_resident": _harmless("only with --enable-paged-experts"),
    "enable_nvidia_megakernel": _harmless("SGLang itself refuses it beside --enable-hierarchical-cache"),
    "enable_amd_monokernel": _harmless("SGLang itself refuses it beside --enable-hierarchical-cache"),
    "enable_dsa_fused_indexer": _harmless("AMD only, where shared pages of DSA models are refused"),
    "dsa_triton_union": _harmless("how the dsa backend groups its reads"),
    "enable_return_aux_hidden_states": _harmless("no draft is run; --speculative-algorithm is dropped"),
    "aux_hidden_state_capture": _harmless("resolved from --enable-return-aux-hidden-states"),
    "return_aux_hidden_state_layer_ids": _harmless("only with --enable-return-aux-hidden-states"),
    "cuda_graph_max_seq_len_prefill": _harmless("which batches a graph takes; with shared pages there are none"),
    "cuda_graph_prefill_max_context": _harmless("which batches a graph takes; with shared pages there are none"),
}
"""Those that only newer releases have; `OLDER_FIELDS`, that only older ones have."""

OLDER_FIELDS: Final[dict[str, FieldRow]] = {
    "elastic_ep_rejoin": _harmless("only with --elastic-ep-backend"),
}

WITHOUT_EFFECT: Final[dict[str, str]] = {
    "--hicache-storage-backend": (
        "hicache_storage_prefetch_policy hicache_storage_backend_extra_config "
        "hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts"
    ),
    "--enable-unified-cache-external-linker": "unified_cache_external_linker_backend",
    "--enable-hisparse": "hisparse_config",
    "--enable-lmcache": "lmcache_config_file",
    "--enable-flexkv": "flexkv_config_file",
    "--dcp-size above 1": "dcp_comm_backend dcp_replicate_q_proj",
    "--dllm-algorithm": "dllm_algorithm_config dllm_fdfo",
    "--speculative-algorithm": (
        "uno_lora_path speculative_draft_model_path speculative_draft_model_revision "
        "speculative_draft_load_format speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens "
        "speculative_dflash_block_size speculative_dspark_block_size speculative_dspark_sps_table_path "
        "speculative_dspark_confidence_sts_path speculative_dspark_align_verify_tokens_to_graph_tier "
        "speculative_accept_threshold_single speculative_accept_threshold_acc speculative_use_rejection_sampling "
        "speculative_token_map speculative_attention_mode speculative_draft_attention_backend "
        "speculative_dsa_topk_backend speculative_draft_kv_cache_dtype speculative_draft_window_size "
        "speculative_moe_runner_backend speculative_moe_a2a_backend speculative_draft_model_quantization "
        "_speculative_draft_quantization_explicitly_set enable_multi_layer_eagle speculative_adaptive "
        "speculative_adaptive_config spec_trace_dir speculative_ngram_min_bfs_breadth "
        "speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth "
        "speculative_ngram_capacity speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget "
        "speculative_ngram_external_corpus_max_tokens speculative_domino_candidate_pool_size"
    ),
    "--disaggregation-mode prefill or decode": (
        "disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device "
        "disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache "
        "disaggregation_decode_retraction_backup num_reserved_decode_tokens disaggregation_decode_extra_slots "
        "disaggregation_decode_polling_interval optimistic_prefill_attempts"
    ),
    "a model with sliding-window layers": (
        "swa_full_tokens_ratio disable_hybrid_swa_memory c128_page_size dsv4_prefill_backend dsv4_attn_backend "
        "enable_deepseek_v4_fp4_indexer"
    ),
    "a model with recurrent layers (Mamba, linear attention)": (
        "mamba_backend max_mamba_cache_size mamba_ssm_dtype mamba_max_states_per_path "
        "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds mamba_full_memory_ratio "
        "mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval enable_int8_mamba_checkpoint "
        "int8_mamba_ckpt_size linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend "
        "linear_attn_verify_backend enable_linear_replayssm linear_replayssm_cache_len "
        "enable_linear_replayssm_spec"
    ),
}
"""Fields that mean something only beside what the row of this name in `refusals` refuses."""

NEWER_WITHOUT_EFFECT: Final[dict[str, str]] = {
    "--enable-unified-cache-external-linker": "unified_cache_external_linker_config enable_linker_mla_dedup",
    "--kv-cache-dtype nvfp4, fp4_mx_block16 or mxfp8": "prefill_kv_cache_dequant_dtype",
    "--speculative-algorithm": (
        "speculative_enable_w4a4_mxfp4_megamoe speculative_boundary_reduction speculative_use_block_verification "
        "speculative_draft_sink_size"
    ),
    "--disaggregation-mode prefill or decode": (
        "disaggregation_enable_kv_checksum enable_pd_role_switch disaggregation_decode_host_receive_threshold "
        "disaggregation_decode_allocation_policy"
    ),
    "a model with sliding-window layers": (
        "_swa_full_tokens_ratio_explicitly_set swa_prefix_tails enable_encoder_swa_bounded_replay "
        "enable_decoder_swa_bounded_replay"
    ),
    "a model with recurrent layers (Mamba, linear attention)": "enable_cp_tp_group_sharing",
    "a model with index keys beside KV heads (MiniMax-M3, QSA)": "qsa_indexer_dtype",
}
OLDER_WITHOUT_EFFECT: Final[dict[str, str]] = {
    "--speculative-algorithm": "speculative_skip_dp_mlp_sync",
}


def names(groups: dict[str, str]) -> list[str]:
    """The fields of `WITHOUT_EFFECT` and its like."""
    return [name for group in groups.values() for name in group.split()]


COMMON: Final = (*FIELDS, *names(WITHOUT_EFFECT), *UNCONCERNED)
NEWER: Final = (*NEWER_FIELDS, *names(NEWER_WITHOUT_EFFECT), *UNCONCERNED_NEWER)
OLDER: Final = (*OLDER_FIELDS, *names(OLDER_WITHOUT_EFFECT), *UNCONCERNED_OLDER)
