"""What the user selected, from the flags to every process of the server.

The choice travels as an underscore attribute of SGLang's `ServerArgs`, which SGLang pickles to its schedulers. A
server without one of our flags has no such attribute, and nothing of this package takes part in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sglang.srt.mem_cache.layouts.config import LayoutConfig
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError
from sglang.srt.mem_cache.layouts.registry import create_group, create_layout, known_layouts

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang.srt.mem_cache.layouts.protocol import AnyKVLayoutStrategy

STRATEGY_FLAG: Final = "--kv-layout-strategy"
CONFIG_FLAG: Final = "--kv-layout-config"
CP_SHARED_FLAG: Final = "--enable-nsa-prefill-cp-shared-kv"
KEYWORDS: Final = {
    "kv_layout_strategy": STRATEGY_FLAG,
    "kv_layout_config": CONFIG_FLAG,
    "enable_nsa_prefill_cp_shared_kv": CP_SHARED_FLAG,
}
"""Our keywords of an `Engine`, and the flags that mean the same."""

CP_SHARED_LAYOUT: Final = "cp_shared"
RADIX_BACKEND: Final = "kv_layout"

ATTRIBUTE: Final = "_kv_layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """The layout strategy of a server and its settings. `flag` is how it was asked for, for messages."""

    strategy: str
    options: Mapping[str, object] = field(default_factory=dict)
    flag: str = STRATEGY_FLAG

    @property
    def asked(self) -> str:
        """The user's words: ``--kv-layout-strategy cp_shared`` or ``--enable-nsa-prefill-cp-shared-kv``."""
        return self.flag if self.flag == CP_SHARED_FLAG else f"{self.flag} {self.strategy}"

    def create(self, *, page_size: int, shard_size: int, shard_rank: int) -> AnyKVLayoutStrategy:
        """The strategy for one rank. `LayoutConfigError` for an unknown name, setting or impossible geometry."""
        return create_layout(self._config(page_size, shard_size, shard_rank))

    def create_group(self, *, page_size: int, shard_size: int) -> list[AnyKVLayoutStrategy]:
        """The strategies of all ranks. `LayoutConfigError` besides where a page would not have exactly one owner."""
        return create_group(self._config(page_size, shard_size, 0))

    def wants_peers(self, page_size: int) -> bool:
        """Whether the strategy would share pages out, on either tier, if only the shard group had a second rank."""
        from sglang.srt.mem_cache.layouts.facts import needs_peers

        return needs_peers(self.create(page_size=page_size, shard_size=2, shard_rank=0))

    def _config(self, page_size: int, shard_size: int, shard_rank: int) -> LayoutConfig:
        return LayoutConfig(
            name=self.strategy,
            page_size=page_size,
            shard_size=shard_size,
            shard_rank=shard_rank,
            options=self.options,
        )


def choose(
    strategy: str | None, config: str | Mapping[str, object] | None, *, enable_cp_shared: bool
) -> LayoutChoice | None:
    """The choice that the three flags make together; None if none of them is given.

    `config` is JSON, ``@file`` with JSON, or, from Python, a mapping. Raises `LayoutConfigError` for a name that is
    not known, two flags that contradict each other, settings without a strategy, and settings that are no object.
    """
    if enable_cp_shared and strategy not in (None, CP_SHARED_LAYOUT):
        raise LayoutConfigError(
            f"{CP_SHARED_FLAG} implies {STRATEGY_FLAG} {CP_SHARED_LAYOUT}, got {STRATEGY_FLAG} {strategy}; drop one"
        )
    if strategy is None and not enable_cp_shared:
        if config:
            raise LayoutConfigError(f"{CONFIG_FLAG} needs {STRATEGY_FLAG}; accepted: {', '.join(known_layouts())}")
        return None
    name = CP_SHARED_LAYOUT if strategy is None else strategy
    if name not in known_layouts():
        raise LayoutConfigError(f"{STRATEGY_FLAG} must be one of {', '.join(known_layouts())}, got {name!r}")
    flag = CP_SHARED_FLAG if strategy is None else STRATEGY_FLAG
    return LayoutChoice(strategy=name, options=_options(config), flag=flag)


def choice_of(server_args: ServerArgs) -> LayoutChoice | None:
    """The choice that travels with `server_args`."""
    choice: LayoutChoice | None = getattr(server_args, ATTRIBUTE, None)
    return choice


def attach_choice(server_args: ServerArgs, choice: LayoutChoice) -> None:
    """Make `choice` travel with `server_args`, replacing an earlier one."""
    setattr(server_args, ATTRIBUTE, choice)


def _options(config: str | Mapping[str, object] | None) -> Mapping[str, object]:
    if config is None:
        return {}
    options: object = config
    if isinstance(config, str):
        text = _read(config[1:]) if config.startswith("@") else config
        try:
            options = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LayoutConfigError(
                f"{CONFIG_FLAG} must be JSON or @FILE with JSON, got {_shown(config)}: {error}"
            ) from error
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise LayoutConfigError(f"{CONFIG_FLAG} must be a JSON object, got {_shown(config)}")
    return dict(options)


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name, or bytes that are not UTF-8
        reason = "is not UTF-8" if isinstance(error, UnicodeError) else getattr(error, "strerror", None) or error
        raise LayoutConfigError(f"{CONFIG_FLAG}: cannot read {file!r}: {reason}; give JSON or @FILE") from error


def _shown(config: object) -> str:
    """A bad value in at most 40 characters of one line."""
    text = repr(config)
    return f"{text[:37]}..." if len(text) > 40 else text
