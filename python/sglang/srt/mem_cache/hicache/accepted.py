"""What SGLang accepts, as plain values: the commands read them before SGLang is loaded, so nothing is imported here."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

WritePolicy: TypeAlias = Literal["write_through", "write_through_selective", "write_back"]
WRITE_POLICIES: Final[tuple[str, ...]] = get_args(WritePolicy)

DSA_PAGE_SIZE: Final = 64
"""The only page size, in tokens, of a DSA pool."""
