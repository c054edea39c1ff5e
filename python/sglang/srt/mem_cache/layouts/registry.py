"""Layout strategies by name: a read-only table of lazy factories, open to other distributions.

A distribution adds a strategy with an entry point in the group ``sglang.kv_layouts`` whose object is a
callable from `LayoutConfig` to a strategy::

    [project.entry-points."sglang.kv_layouts"]
    my_layout = "my_package.layout:MyLayout.from_config"
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING

from .errors import LayoutConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .config import LayoutConfig
    from .protocol import AnyKVLayoutStrategy

ENTRY_POINT_GROUP = "sglang.kv_layouts"


def _identity(config: LayoutConfig) -> AnyKVLayoutStrategy:
    from .identity import IdentityLayout

    return IdentityLayout.from_config(config)


def _cp_shared(config: LayoutConfig) -> AnyKVLayoutStrategy:
    from .cp_shared import CpSharedLayout

    return CpSharedLayout.from_config(config)


def _host_shared(config: LayoutConfig) -> AnyKVLayoutStrategy:
    from .host_shared import HostSharedLayout

    return HostSharedLayout.from_config(config)


def _dcp_striped(config: LayoutConfig) -> AnyKVLayoutStrategy:
    from .dcp_striped import DcpStripedLayout

    return DcpStripedLayout.from_config(config)


BUILT_IN: Mapping[str, Callable[[LayoutConfig], AnyKVLayoutStrategy]] = MappingProxyType(
    {"identity": _identity, "cp_shared": _cp_shared, "host_shared": _host_shared, "dcp_striped": _dcp_striped}
)


def known_layouts() -> tuple[str, ...]:
    """Names that `create_layout` accepts: the built-in ones first, then other distributions' by name."""
    others = {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)} - set(BUILT_IN)
    return (*BUILT_IN, *sorted(others))


def create_layout(config: LayoutConfig) -> AnyKVLayoutStrategy:
    """Build the strategy that `config.name` selects.

    A built-in name cannot be taken over by another distribution. Raises `LayoutConfigError` that lists the
    known names if there is none of that name, names both distributions if two offer it, or says why its entry
    point cannot be loaded or called.
    """
    factory = BUILT_IN.get(config.name)
    if factory is not None:
        return factory(config)
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=config.name))
    if not found:
        raise LayoutConfigError(
            f"--kv-layout-strategy must be one of {', '.join(known_layouts())}, got {config.name!r}"
        )
    if len({entry.value for entry in found}) > 1:
        offers = " and ".join(sorted({_offer(entry) for entry in found}))
        raise LayoutConfigError(f"--kv-layout-strategy {config.name!r} is offered twice: {offers}; uninstall one")
    try:
        build: Callable[[LayoutConfig], AnyKVLayoutStrategy] = found[0].load()
    except Exception as error:  # another distribution's code
        raise LayoutConfigError(
            f"--kv-layout-strategy {config.name!r} cannot be loaded from {_offer(found[0])}: "
            f"{type(error).__name__}: {error}; mend its entry point or uninstall it"
        ) from error
    try:
        return build(config)
    except ValueError:  # a refusal: `LayoutConfigError` is one
        raise
    except Exception as error:  # another distribution's code
        raise LayoutConfigError(
            f"--kv-layout-strategy {config.name!r} cannot be made by {_offer(found[0])}: "
            f"{type(error).__name__}: {' '.join(str(error).split())}; mend it or uninstall it"
        ) from error


def create_group(config: LayoutConfig) -> list[AnyKVLayoutStrategy]:
    """The strategies of all ranks of the group of `config`, whose own rank does not matter.

    Raises what `create_layout` raises, and `LayoutConfigError` where a page would have no owner or several.
    """
    from .owner_check import refuse_shared_owners

    layouts = [create_layout(replace(config, shard_rank=rank)) for rank in range(config.shard_size)]
    refuse_shared_owners(layouts)
    return layouts


def _offer(entry: EntryPoint) -> str:
    distribution = entry.dist.name if entry.dist is not None else "an unnamed distribution"
    return f"{distribution} ({entry.value})"
