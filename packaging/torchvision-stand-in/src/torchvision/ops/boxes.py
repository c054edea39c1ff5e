"""Stand-in for ``torchvision.ops.boxes``: box operators raise."""

from __future__ import annotations

from torchvision._stand_in import unavailable_names

__getattr__ = unavailable_names(__name__, ("batched_nms", "nms"))
