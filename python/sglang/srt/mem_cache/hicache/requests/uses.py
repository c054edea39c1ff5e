"""`RequestUses`: one request is one use of a node, however often its tokens are put into the tree.

A server inserts a prompt after its prefill and again, with the answer, when the request ends; a retracted request comes
back and inserts once more. Hits decide about backups and, in some orders, about eviction, so only the first of these
counts. What is remembered is the number of tokens: the nodes of a request's tokens may be split meanwhile, but a split
moves no boundary.
"""

from __future__ import annotations

from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from ..tree.calls import RequestUse

SchedulerRequest: TypeAlias = Any  # what has the attributes of SGLang's `Req`


class RequestUses:
    """What each request alive has used. A request that ends, in whatever way, is forgotten with its object."""

    def __init__(self) -> None:
        self._uses: WeakKeyDictionary[SchedulerRequest, RequestUse] = WeakKeyDictionary()

    def of(self, request: SchedulerRequest) -> RequestUse:
        """The use by `request`, which goes on from one insert to the next."""
        return self._uses.setdefault(request, RequestUse())
