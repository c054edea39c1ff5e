from enum import IntEnum

class P2PTag(IntEnum):
    HIRADIX_PP_SYNC = ...
