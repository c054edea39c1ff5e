from enum import Enum

class StorageMedium(str, Enum):  # noqa: UP042  # a StrEnum would print its members otherwise
    GPU = "GPU"
    CPU = "CPU_PINNED"

class BlockStored:
    block_hashes: list[int]
    token_ids: list[int]
    block_size: int
    medium: str | None
