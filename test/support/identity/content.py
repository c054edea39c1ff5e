"""What is in the device pools, and what is in the trees.

The KV content of a token is a function of its prefix and namespace, as it is in a model, so every slot can be checked
without remembering who wrote it.
"""

from __future__ import annotations

import zlib
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang.srt.mem_cache.hicache.device.pools import index_buffers, kv_buffers

if TYPE_CHECKING:
    import numpy.typing as npt

    from support.identity.reference import Side


def prefix_codes(tokens: array[int], namespace: str | None) -> npt.NDArray[np.uint64]:
    """A code for each token: a function of the namespace and all tokens up to it."""
    values = np.array(tokens, dtype=np.uint64) + np.arange(len(tokens), dtype=np.uint64) * np.uint64(1 << 32)
    seed = np.uint64(zlib.crc32((namespace or "").encode()))
    return np.cumsum(_mix(values + np.uint64(1)), dtype=np.uint64) + seed


def write_content(side: Side, slots: torch.Tensor, codes: npt.NDArray[np.uint64]) -> None:
    """Write what the tokens with `codes` have into `slots`, whole pages, as a forward pass would."""
    for rows, at, expected in _content(side, slots, codes):
        rows[at] = expected


def content_is_right(side: Side, slots: torch.Tensor, codes: npt.NDArray[np.uint64]) -> bool:
    """Whether every byte of `slots`, whole pages, is what the tokens with `codes` have."""
    return all(torch.equal(rows[at], expected) for rows, at, expected in _content(side, slots, codes))


def _content(
    side: Side, slots: torch.Tensor, codes: npt.NDArray[np.uint64]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each buffer: all its rows as bytes, the rows in question, and their content."""
    slots = slots.to(torch.int64)
    pages = slots[:: side.page_size] // side.page_size
    buffers = [(buffer, slots, codes) for buffer in kv_buffers(side.pool)]
    buffers += [(buffer, pages, codes[side.page_size - 1 :: side.page_size]) for buffer in index_buffers(side.pool)]
    parts = []
    for number, (buffer, at, row_codes) in enumerate(buffers):
        rows = buffer.view(len(buffer), -1).view(torch.uint8)
        words = _mix(row_codes + np.uint64(number))
        repeats = -(-rows.shape[1] // words.itemsize)
        content = np.tile(words[:, None], (1, repeats)).view(np.uint8)[:, : rows.shape[1]]
        parts.append((rows, at, torch.from_numpy(np.ascontiguousarray(content))))
    return parts


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def cached_content_is_right(side: Side) -> bool:
    """Whether every slot that the tree has on the device holds what its token has."""
    root: Any = side.cache.root_node
    stack = [(node, array("q"), torch.empty(0, dtype=torch.int64)) for node in root.children.values()]
    while stack:
        node, tokens, slots = stack.pop()
        if node.value is None:
            continue
        tokens, slots = tokens + node.key.token_ids, torch.cat([slots, node.value])
        if not content_is_right(side, slots, prefix_codes(tokens, node.key.extra_key)):
            return False
        stack.extend((child, tokens, slots) for child in node.children.values())
    return True


def tokens_above(node: Any) -> int:  # noqa: ANN401
    """Tokens from the root to the end of `node`: which node it is, said without its identity."""
    tokens = 0
    while node.parent is not None:
        tokens += len(node.key)
        node = node.parent
    return tokens


def totals(side: Side) -> dict[str, int]:
    """The cache's and the pools' totals, in tokens."""
    return {
        "evictable": side.cache.evictable_size(),
        "protected": side.cache.protected_size(),
        "free slots": side.allocator.available_size(),
        "free host tokens": side.cache.token_to_kv_pool_host.available_size(),
        "free request rows": side.requests.available_size(),
    }


def tree(side: Side) -> list[tuple[object, ...]]:
    """Every node below the root, parents first, siblings in the order of their keys."""
    nodes: list[tuple[object, ...]] = []
    stack = [(0, node) for node in _ordered(side.cache.root_node)]
    while stack:
        depth, node = stack.pop()
        if node.value is not None and len(node.value) != len(node.key):
            raise AssertionError(f"a node of {len(node.key)} tokens has {len(node.value)} slots")
        nodes.append(
            (
                depth,
                node.key.extra_key,
                node.key.token_ids.tobytes(),
                "evicted" if node.evicted else "on the device",
                "backed up" if node.backuped else "not backed up",
                f"lock_ref {node.lock_ref}",
                f"hit_count {node.hit_count}",
                f"priority {node.priority}",
            )
        )
        stack.extend((depth + 1, child) for child in _ordered(node))
    return nodes


def _ordered(node: Any) -> list[Any]:  # noqa: ANN401
    return sorted(node.children.values(), key=lambda child: (child.key.extra_key or "", child.key.token_ids.tobytes()))
