"""Which of SGLang's settings go together with a layout strategy: one table, read by the server, tests and docs.

A row says when it applies, what the answer is, and what the user can do. The table is walked in the parent process,
after SGLang has resolved its own settings and before anything is spawned. Add a row, and the documentation and the
test of all combinations have it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

from .choice import RADIX_BACKEND, STRATEGY_FLAG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VERIFIED_ATTENTION_BACKENDS: Final = frozenset({"torch_native", "triton"})


class Answer(Enum):
    """What happens when a row applies."""

    REFUSED = "refused"
    WARNED = "works, with a warning"


class Scope(Enum):
    """Which strategies a row concerns."""

    ANY = "any strategy"
    SHARDED = "strategies of several lanes, which share pages out"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the model's configuration says about its KV pool."""

    is_mla: bool = True
    has_uneven_heads: bool = False  # keys and values of other widths
    is_dsa: bool = False
    index_kpool: int = 1  # tokens that share an index key of a DSA model
    indexes_heads: bool = False  # index keys beside KV heads
    index_share: float = 0.0  # bytes of its index keys beside one byte of KV
    is_hybrid_swa: bool = False
    is_recurrent: bool = False


class SettingUnknownError(Exception):
    """`ServerFacts.args` of a server that is only planned does not have a setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A server about to start. `args` answers with SGLang's resolved value of each of its fields.

    It may raise `SettingUnknownError`: rows that ask for the setting do not apply.
    """

    args: Any
    model: ModelFacts
    shard_size: int
    on_cpu: bool
    on_nvidia: bool = False
    graphs_on: bool = False
    graphs_asked_for: bool = False
    pool_shrinks: bool = False  # once graphs are captured


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row: `setting` as the user writes it, `why` it matters and the `remedy`, each a phrase."""

    setting: str
    applies: Callable[[ServerFacts], bool]
    why: str
    remedy: str
    answer: Answer = Answer.REFUSED
    scope: Scope = Scope.ANY

    def message(self, asked: str) -> str:
        """One line that names both settings."""
        verb = "does not go together with" if self.answer is Answer.REFUSED else "with"
        return f"{asked} {verb} {self.setting}: {self.why}; {self.remedy}"


def _set(field: str) -> Callable[[ServerFacts], bool]:
    return lambda facts: bool(getattr(facts.args, field))


def _has_several_groups(facts: ServerFacts) -> bool:
    from ..seam.server_flags import attention_groups  # loads SGLang

    return attention_groups(facts.args) > 1


def _set_here(field: str) -> Callable[[ServerFacts], bool]:
    """As `_set`, for a field that only some releases have."""

    def asked(facts: ServerFacts) -> bool:
        from ..seam.server_flags import FIELDS  # loads SGLang, which a command without a model does not need

        return field in FIELDS and bool(getattr(facts.args, field))

    return asked


def _above_one(field: str) -> Callable[[ServerFacts], bool]:
    return lambda facts: getattr(facts.args, field) > 1


def _unverified_attention(facts: ServerFacts) -> bool:
    args = facts.args
    chosen = {args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend} - {None}
    return not chosen <= VERIFIED_ATTENTION_BACKENDS


RULES: Final[tuple[Rule, ...]] = (
    Rule(
        setting="a launch without --enable-hierarchical-cache",
        applies=lambda facts: not facts.args.enable_hierarchical_cache,
        why="a layout strategy places the pages of the hierarchical cache",
        remedy="add --enable-hierarchical-cache",
    ),
    Rule(
        setting="--disable-radix-cache",
        applies=_set("disable_radix_cache"),
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
        applies=_set("enable_hisparse"),
        why="its pool keeps part of the KV elsewhere",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--enable-lmcache",
        applies=_set("enable_lmcache"),
        why="LMCache replaces the hierarchical cache",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--enable-flexkv",
        applies=_set("enable_flexkv"),
        why="FlexKV replaces the hierarchical cache",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--enable-unified-cache-external-linker",
        applies=_set("enable_unified_cache_external_linker"),
        why="the linker belongs to SGLang's unified tree",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--enable-session-radix-cache",
        applies=_set("enable_session_radix_cache"),
        why="sessions belong to SGLang's unified tree",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--enable-streaming-session",
        applies=_set("enable_streaming_session"),
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
        applies=_set_here("enable_kv_cache_sharding"),
        why="both would say which rank keeps a page",
        remedy="drop one of the two",
    ),
    Rule(
        setting="--enable-unified-memory",
        applies=_set("enable_unified_memory"),
        why="its pools share one buffer whose pages the host tier cannot describe",
        remedy="drop --enable-unified-memory",
    ),
    Rule(
        setting="--enable-page-major-kv-layout",
        applies=_set("enable_page_major_kv_layout"),
        why="its rows lie in an order that the host tier cannot describe",
        remedy="drop --enable-page-major-kv-layout",
    ),
    Rule(
        setting="--prefill-only-disable-kv-cache",
        applies=_set("prefill_only_disable_kv_cache"),
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
        applies=_above_one("dcp_size"),
        why="decode context parallelism shares pages out in its own way",
        remedy="use --dcp-size 1",
    ),
    Rule(
        setting="--speculative-algorithm",
        applies=_set("speculative_algorithm"),
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
        applies=_set("dllm_algorithm"),
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
    Rule(
        setting="a model without latent KV (MHA, GQA)",
        applies=lambda facts: not facts.model.is_mla,
        why="every rank holds other heads, so no rank can keep a page for the others",
        remedy=f"use an MLA model such as DeepSeek-V2, or {STRATEGY_FLAG} identity",
        scope=Scope.SHARDED,
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
        scope=Scope.SHARDED,
    ),
    Rule(
        setting="several attention groups (--attn-dp-size, or --dp-size with --enable-dp-attention)",
        applies=_has_several_groups,
        why="each group has its own tree, and that was not tested with shared pages",
        remedy="use one attention group",
        scope=Scope.SHARDED,
    ),
    Rule(
        setting="--pp-size above 1",
        applies=_above_one("pp_size"),
        why="pipeline stages were not tested with shared pages",
        remedy="use --pp-size 1",
        scope=Scope.SHARDED,
    ),
    Rule(
        setting="--elastic-ep-backend",
        applies=lambda facts: facts.args.elastic_ep_backend not in (None, "none"),
        why="a rank that leaves takes its pages along",
        remedy="drop one of the two",
        scope=Scope.SHARDED,
    ),
    Rule(
        setting="--enable-two-batch-overlap",
        applies=_set("enable_two_batch_overlap"),
        why="two batches at once would gather pages in different orders on different ranks",
        remedy="drop --enable-two-batch-overlap",
        scope=Scope.SHARDED,
    ),
    Rule(
        setting="--enable-pdmux",
        applies=_set("enable_pdmux"),
        why="two batches at once would gather pages in different orders on different ranks",
        remedy="drop --enable-pdmux",
        scope=Scope.SHARDED,
    ),
    Rule(
        setting="--enable-dsa-cache-layer-split",
        applies=_set("enable_dsa_cache_layer_split"),
        why="layers are shared out already",
        remedy="drop one of the two",
        scope=Scope.SHARDED,
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
        applies=_above_one("attn_cp_size"),
        why="sharing pages over a context-parallel group was not verified in this release",
        remedy="compare answers with identity before you rely on it",
        answer=Answer.WARNED,
        scope=Scope.SHARDED,
    ),
)


def applying(facts: ServerFacts, *, sharded: bool) -> Iterator[Rule]:
    """The rows that apply to a server whose strategy shares pages out, or does not."""
    for rule in RULES:
        if (sharded or rule.scope is Scope.ANY) and _applies(rule, facts):
            yield rule


def _applies(rule: Rule, facts: ServerFacts) -> bool:
    try:
        return rule.applies(facts)
    except SettingUnknownError:
        return False


def refuse_what_does_not_fit(facts: ServerFacts, asked: str, *, sharded: bool) -> list[str]:
    """Raise `LayoutConfigError` for the first refusal; return the warnings. Nothing has been started yet."""
    rules = list(applying(facts, sharded=sharded))
    for rule in rules:
        if rule.answer is Answer.REFUSED:
            raise LayoutConfigError(rule.message(asked))
    return [rule.message(asked) for rule in rules]


def rules_as_markdown() -> str:
    """The table as the documentation shows it: one for each answer and scope. To drop something goes without saying."""
    tables = []
    for answer in Answer:
        for scope in Scope:
            rows = [rule for rule in RULES if rule.answer is answer and rule.scope is scope]
            if rows:
                heading = f"{answer.value.capitalize()} ({scope.value}):"
                table = ["| Setting | Why, and what to do |", "|---|---|"]
                table += [f"| {rule.setting} | {rule.why}{_advice(rule)} |" for rule in rows]
                tables.append("\n".join([heading, "", *table, ""]))
    return "\n".join(tables)


def _advice(rule: Rule) -> str:
    return "" if rule.remedy.startswith("drop") else f"; {rule.remedy}"
