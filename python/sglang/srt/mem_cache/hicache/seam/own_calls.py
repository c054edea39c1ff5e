"""`OwnCalls`: what a cache can do in our own words, which `seam.calls` builds on."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Generic

from sglang.srt.mem_cache.radix_cache import RadixCache

from sglang.srt.mem_cache.layouts.protocol import MetadataT

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from ..requests.insertion import RequestInsertion
    from ..tree.calls import Inserted, Insertion, LoadedBack, Match
    from ..tree.node import LayoutTreeNode
    from ..tree.parts import TreeParts


class OwnCalls(RadixCache, Generic[MetadataT]):
    """See `radix_cache.HiRadixCache` for each of them."""

    parts: TreeParts[MetadataT]
    requests: RequestInsertion[MetadataT] | None

    @abstractmethod
    def match(self, key: RadixKey) -> Match[MetadataT]:
        """The longest cached prefix of `key`."""

    @abstractmethod
    def put(self, insertion: Insertion) -> Inserted[MetadataT]:
        """Put a chain of slots into the tree."""

    @abstractmethod
    def bring_back(self, node: LayoutTreeNode[MetadataT], mem_quota: int | None = None) -> LoadedBack[MetadataT]:
        """Load back from the host, down to `node`."""

    @property
    @abstractmethod
    def insertion(self) -> RequestInsertion[MetadataT]:
        """The steps of putting a request into the tree."""
