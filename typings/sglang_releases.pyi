# Conditions of these stubs, one for each release that changed something: true from that release on.
# `scripts/typecheck.py` tells mypy which hold, `kvlayouts check` decides by the installed release.
SINCE_0_5_23: bool
