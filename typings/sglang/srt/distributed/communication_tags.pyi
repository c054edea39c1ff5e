from enum import IntEnum

from sglang_releases import SINCE_0_5_23

class P2PTag(IntEnum):
    if SINCE_0_5_23:
        HICACHE_PP_SYNC = ...
    else:
        HIRADIX_PP_SYNC = ...
