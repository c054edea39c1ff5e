"""`kvlayouts check`."""
