"""`SchedulerCalls`: what SGLang's scheduler calls of a cache, in the words of the release that is installed."""

from __future__ import annotations

from .features import SINCE_0_5_23

if SINCE_0_5_23:
    from .calls_since_0_5_23 import SchedulerCalls
else:
    from .calls_until_0_5_20 import SchedulerCalls

__all__ = ["SchedulerCalls"]
