"""Layout strategies: which rank of a shard group owns which KV page, and what must be copied where.

Pure: imports torch and numpy, never SGLang. Start with `protocol` (the contract), then `cp_shared`.
"""

from .capabilities import (
    ShardedPoolLayout,
    StorageAwareLayout,
    TurnwiseLayout,
    deals_in_turn,
    names_pages,
    shares_pools,
)
from .config import DEFAULT_LAYOUT, GroupKind, LayoutConfig, LayoutEnvironment, PoolKind
from .cp_shared import CpHiCacheNodeMetadata, CpSharedLayout
from .errors import LayoutConfigError, LayoutInvariantError
from .geometry import CpSharedKVLayout
from .identity import IdentityLayout, IdentityNodeMetadata
from .plans import BackupPlan, CopyPlan, CopyRun, LoadPlan
from .protocol import (
    KVLayoutStrategy,
    MetadataT,
    NodeMetadata,
)
from .registry import AnyKVLayoutStrategy, create_group, create_layout, known_layouts

__all__ = [
    "DEFAULT_LAYOUT",
    "AnyKVLayoutStrategy",
    "BackupPlan",
    "CopyPlan",
    "CopyRun",
    "CpHiCacheNodeMetadata",
    "CpSharedKVLayout",
    "CpSharedLayout",
    "GroupKind",
    "IdentityLayout",
    "IdentityNodeMetadata",
    "KVLayoutStrategy",
    "LayoutConfig",
    "LayoutConfigError",
    "LayoutEnvironment",
    "LayoutInvariantError",
    "LoadPlan",
    "MetadataT",
    "NodeMetadata",
    "PoolKind",
    "ShardedPoolLayout",
    "StorageAwareLayout",
    "TurnwiseLayout",
    "create_group",
    "create_layout",
    "deals_in_turn",
    "known_layouts",
    "names_pages",
    "shares_pools",
]
