"""Settings that do not go together with a strategy that shares pages out, or that it is not verified with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .choice import STRATEGY_FLAG
from .rule import Answer, Rule, Scope, is_above_one, is_set

if TYPE_CHECKING:
    from .facts import ServerFacts

VERIFIED_ATTENTION_BACKENDS: Final = frozenset({"torch_native", "triton"})


def _has_several_groups(facts: ServerFacts) -> bool:
    from ..seam.server_flags import attention_groups  # loads SGLang

    return attention_groups(facts.args) > 1


def _unverified_attention(facts: ServerFacts) -> bool:
    args = facts.args
    chosen = {args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend} - {None}
    return not chosen <= VERIFIED_ATTENTION_BACKENDS


RULES_FOR_SHARED: Final[tuple[Rule, ...]] = (
    Rule(
        setting="a model without latent KV (MHA, GQA)",
        applies=lambda facts: not facts.model.is_mla,
        why="every rank holds other heads, so no rank can keep a page for the others",
        remedy=f"use an MLA model such as DeepSeek-V2, or {STRATEGY_FLAG} identity",
        scope=Scope.PEERS,
    ),
    Rule(
        setting="a model with sparse attention (DSA) without an NVIDIA GPU",
        applies=lambda facts: facts.model.is_mla and facts.model.is_dsa and not facts.on_nvidia,
        why="elsewhere SGLang's indexer stores index keys past the pool, or does not run",
        remedy=f"use an NVIDIA GPU, or {STRATEGY_FLAG} identity",
        scope=Scope.SHARDED,
    ),
    Rule(
        setting="--page-size 1",
        applies=lambda facts: facts.args.page_size == 1,
        why="pages are what is shared out, and a page of one token costs one owner a token",
        remedy="use --page-size 64 or another size above 1",
        scope=Scope.PEERS,
    ),
    Rule(
        setting="several attention groups (--attn-dp-size, or --dp-size with --enable-dp-attention)",
        applies=_has_several_groups,
        why="each group has its own tree, and that was not tested with shared pages",
        remedy="use one attention group",
        scope=Scope.PEERS,
    ),
    Rule(
        setting="--pp-size above 1",
        applies=is_above_one("pp_size"),
        why="pipeline stages were not tested with shared pages",
        remedy="use --pp-size 1",
        scope=Scope.PEERS,
    ),
    Rule(
        setting="--elastic-ep-backend",
        applies=lambda facts: facts.args.elastic_ep_backend not in (None, "none"),
        why="a rank that leaves takes its pages along",
        remedy="drop one of the two",
        scope=Scope.PEERS,
    ),
    Rule(
        setting="--enable-two-batch-overlap",
        applies=is_set("enable_two_batch_overlap"),
        why="two batches at once would gather pages in different orders on different ranks",
        remedy="drop --enable-two-batch-overlap",
        scope=Scope.SHARDED,
    ),
    Rule(
        setting="--enable-pdmux",
        applies=is_set("enable_pdmux"),
        why="two batches at once would gather pages in different orders on different ranks",
        remedy="drop --enable-pdmux",
        scope=Scope.SHARDED,
    ),
    Rule(
        setting="--enable-dsa-cache-layer-split",
        applies=is_set("enable_dsa_cache_layer_split"),
        why="layers are shared out already",
        remedy="drop one of the two",
        scope=Scope.PEERS,
    ),
    Rule(
        setting="--cuda-graph-backend-decode, --cuda-graph-backend-prefill or --cuda-graph-config that asks for graphs",
        applies=lambda facts: facts.graphs_asked_for,
        why="a captured graph cannot gather the pages of another batch",
        remedy="drop it: graphs are switched off then",
        scope=Scope.SHARDED,
    ),
    Rule(
        setting="--enable-torch-compile without a GPU",
        applies=lambda facts: facts.on_cpu and facts.args.enable_torch_compile,
        why="a step compiled ahead cannot gather the pages of another batch",
        remedy="drop --enable-torch-compile",
        scope=Scope.SHARDED,
    ),
    Rule(
        setting="CUDA graphs",
        applies=lambda facts: facts.graphs_on and not facts.graphs_asked_for,
        why="a captured graph cannot gather the pages of another batch",
        remedy="they are switched off for this server",
        answer=Answer.WARNED,
        scope=Scope.SHARDED,
    ),
    Rule(
        setting="an attention backend other than torch_native and triton",
        applies=_unverified_attention,
        why="shared pages were verified with torch_native and triton only in this release",
        remedy="compare answers with identity before you rely on it",
        answer=Answer.WARNED,
        scope=Scope.SHARDED,
    ),
    Rule(
        setting="--attention-context-parallel-size above 1",
        applies=is_above_one("attn_cp_size"),
        why="sharing pages over a context-parallel group was not verified in this release",
        remedy="compare answers with identity before you rely on it",
        answer=Answer.WARNED,
        scope=Scope.PEERS,
    ),
)
