"""A layout strategy for storage: pages are dealt in stripes, and each has a key."""

from .keys import PageKey
from .layout import KeyedLayout

__all__ = ["KeyedLayout", "PageKey"]
