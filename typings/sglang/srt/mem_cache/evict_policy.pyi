from sglang.srt.mem_cache.radix_cache import TreeNode

class EvictionStrategy:
    def get_priority(self, node: TreeNode) -> float | tuple[float, ...]: ...
