"""Transfers under way: what is locked or protected for each, and what is due when its ack is settled.

An id is the node's that was current when the transfer began. Nodes may be split meanwhile; the records here
then cover both halves, and each lock and each protection is undone exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.protocol import MetadataT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .node import LayoutTreeNode


@dataclass(slots=True, kw_only=True)
class Backup(Generic[MetadataT]):
    """A backup under way: `node` is the one that was locked (if `locked`), `parts` all that it covers now."""

    node: LayoutTreeNode[MetadataT]
    locked: bool
    parts: list[LayoutTreeNode[MetadataT]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class LoadBack(Generic[MetadataT]):
    """A load under way: the nodes from `last` up to, but without, `above` are locked and protected."""

    last: LayoutTreeNode[MetadataT]
    above: LayoutTreeNode[MetadataT]

    def nodes(self) -> Iterator[LayoutTreeNode[MetadataT]]:
        """The nodes that are being loaded, deepest first, halves of nodes split meanwhile included.

        `LayoutInvariantError` if the path does not lead to `above`.
        """
        node = self.last
        while node is not self.above:
            yield node
            if node.parent is None:
                raise LayoutInvariantError(f"load of node {self.last.id} lost the node {self.above.id} above it")
            node = node.parent


class InFlight(Generic[MetadataT]):
    """Backups and loads that were submitted and not yet settled, by id."""

    def __init__(self) -> None:
        self.backups: dict[int, Backup[MetadataT]] = {}
        self.loads: dict[int, LoadBack[MetadataT]] = {}
        self._backup_of: dict[LayoutTreeNode[MetadataT], int] = {}

    def begin_backup(self, node: LayoutTreeNode[MetadataT], *, locked: bool) -> None:
        """Record the backup of `node` under its id. `LayoutInvariantError` if it has one under way."""
        if node.id in self.backups:
            raise LayoutInvariantError(f"node {node.id} is backed up while its backup {node.id} is under way")
        self.backups[node.id] = Backup(node=node, locked=locked, parts=[node])
        self._backup_of[node] = node.id

    def split(self, upper: LayoutTreeNode[MetadataT], child: LayoutTreeNode[MetadataT]) -> None:
        """`upper` was split off `child`: a backup of `child` now covers both."""
        backup_id = self._backup_of.get(child)
        if backup_id is not None:
            parts = self.backups[backup_id].parts
            parts.insert(parts.index(child), upper)
            self._backup_of[upper] = backup_id

    def is_copied(self, node: LayoutTreeNode[MetadataT]) -> bool:
        """Whether a backup of `node` is under way: its slots are being read."""
        return node in self._backup_of

    def end_backup(self, backup_id: int) -> Backup[MetadataT]:
        """Forget a backup and return it. `LayoutInvariantError` if no such backup is under way."""
        backup = self.backups.pop(backup_id, None)
        if backup is None:
            raise LayoutInvariantError(f"ack for backup {backup_id}, but under way are {sorted(self.backups)}")
        for part in backup.parts:
            del self._backup_of[part]
        return backup

    def begin_load(self, last: LayoutTreeNode[MetadataT], above: LayoutTreeNode[MetadataT]) -> None:
        """Record a load under the id of `last`. `LayoutInvariantError` if it has one under way."""
        if last.id in self.loads:
            raise LayoutInvariantError(f"node {last.id} is loaded while its load is under way")
        self.loads[last.id] = LoadBack(last=last, above=above)

    def end_load(self, load_id: int) -> LoadBack[MetadataT]:
        """Forget a load and return it. `LayoutInvariantError` if no such load is under way."""
        load = self.loads.pop(load_id, None)
        if load is None:
            raise LayoutInvariantError(f"ack for load {load_id}, but under way are {sorted(self.loads)}")
        return load

    def clear(self) -> None:
        """Forget everything."""
        self.backups.clear()
        self.loads.clear()
        self._backup_of.clear()
