from enum import Enum

class PoolName(str, Enum):  # noqa: UP042  # a StrEnum would print its members otherwise
    KV = "kv"
    INDEXER = "indexer"
