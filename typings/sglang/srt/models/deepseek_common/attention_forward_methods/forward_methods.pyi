from enum import IntEnum

class AttnForwardMethod(IntEnum):
    MLA = ...
