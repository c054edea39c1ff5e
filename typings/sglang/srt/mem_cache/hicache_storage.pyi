from enum import StrEnum

class PoolName(StrEnum):
    KV = "kv"
    INDEXER = "indexer"
