"""Layout strategies: which rank of a shard group owns which KV page, and what must be copied where.

Pure: imports torch and numpy, never SGLang. Start with `protocol` (the contract), then `cp_shared`.
"""

from .capabilities import (
    HostLanesLayout,
    StorageAwareLayout,
    StripedLayout,
    TurnwiseLayout,
    deals_in_turn,
    has_host_lanes,
    names_pages,
    stripes_pages,
)
from .config import DEFAULT_LAYOUT, GroupKind, LayoutConfig, LayoutEnvironment, PoolKind
from .cp_shared import CpHiCacheNodeMetadata, CpSharedLayout
from .dcp_striped import DcpStripedLayout
from .errors import LayoutConfigError, LayoutInvariantError
from .exchange import NO_EXCHANGE, PageExchange
from .host_shared import HostSharedLayout
from .identity import IdentityLayout, IdentityNodeMetadata
from .owner_and_row import CpSharedKVLayout
from .plans import BackupPlan, CopyPlan, CopyRun, LoadPlan
from .protocol import (
    AnyKVLayoutStrategy,
    KVLayoutStrategy,
    MetadataT,
    NodeMetadata,
)
from .registry import create_group, create_layout, known_layouts

__all__ = [
    "DEFAULT_LAYOUT",
    "NO_EXCHANGE",
    "AnyKVLayoutStrategy",
    "BackupPlan",
    "CopyPlan",
    "CopyRun",
    "CpHiCacheNodeMetadata",
    "CpSharedKVLayout",
    "CpSharedLayout",
    "DcpStripedLayout",
    "GroupKind",
    "HostLanesLayout",
    "HostSharedLayout",
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
    "PageExchange",
    "PoolKind",
    "StorageAwareLayout",
    "StripedLayout",
    "TurnwiseLayout",
    "create_group",
    "create_layout",
    "deals_in_turn",
    "has_host_lanes",
    "known_layouts",
    "names_pages",
    "stripes_pages",
]
