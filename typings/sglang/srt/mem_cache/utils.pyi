from collections.abc import Mapping

from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.radix_cache import TreeNode

def compute_node_hash_values(node: TreeNode, page_size: int) -> list[str]: ...
def split_node_hash_value(
    child_hash_value: list[str] | None, split_len: int, page_size: int
) -> tuple[list[str] | None, list[str] | None]: ...
def get_eviction_strategy(eviction_policy: str, config: Mapping[str, object] | None = None) -> EvictionStrategy: ...
