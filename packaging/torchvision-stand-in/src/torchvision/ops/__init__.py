"""Stand-in for ``torchvision.ops``: box and mask operators raise."""

from __future__ import annotations

from torchvision._stand_in import unavailable_names
from torchvision.ops import boxes

__all__ = ["boxes"]
__getattr__ = unavailable_names(__name__, ("masks_to_boxes", "nms", "roi_align"))
