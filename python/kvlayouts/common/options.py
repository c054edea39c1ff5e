"""Options that several commands have, as decorators; `gathered` hands all that was given over as one record."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

import click

from kvlayouts.common.values import (
    MAX_CP_SIZE,
    MAX_PAGE_SIZE_TOKENS,
    MAX_SEED,
    TRACE_BLOCK_TOKENS,
    EvictionPolicy,
    HostLayout,
    PoolName,
    WritePolicy,
)

if TYPE_CHECKING:
    from collections.abc import Callable

GivenT = TypeVar("GivenT")
CommandT = TypeVar("CommandT", bound="Callable[..., int]")

FILE: Final = click.Path(path_type=Path)
RANKS: Final = click.IntRange(1, MAX_CP_SIZE)
PAGE_TOKENS: Final = click.IntRange(1, MAX_PAGE_SIZE_TOKENS)

trace_argument = click.argument("trace", type=FILE, required=False)
layout_option = click.option("--layout", default="cp_shared", help="Layout strategy.")
pool_option = click.option("--pool", type=click.Choice(get_args(PoolName)), default="mla", help="KV pool of the model.")
policy_option = click.option(
    "--policy",
    type=click.Choice(get_args(WritePolicy)),
    default="write_through",
    help="When pages are copied to host.",
)
eviction_policy_option = click.option(
    "--eviction-policy", type=click.Choice(get_args(EvictionPolicy)), default="lru", help="Order of eviction."
)
host_layout_option = click.option(
    "--host-mem-layout",
    "host_layout",
    type=click.Choice(get_args(HostLayout)),
    default="layer_first",
    help="Byte order in host memory, as SGLang's --hicache-mem-layout.",
)
block_tokens_option = click.option(
    "--block-tokens",
    type=click.IntRange(1, TRACE_BLOCK_TOKENS),
    default=TRACE_BLOCK_TOKENS,
    help="Scale the trace's 512-token blocks down to N tokens; need not match the page size.",
)


def layout_config_option(help: str = "Settings of the strategy.") -> Callable[[CommandT], CommandT]:
    """JSON, or a file that holds it."""
    return click.option("--layout-config", metavar="JSON|@FILE", help=help)


def layouts_option(*default: str) -> Callable[[CommandT], CommandT]:
    """Strategies to compare."""
    return click.option("--layout", "layouts", multiple=True, default=default, help="Layout strategy; repeat for more.")


def requests_option(help: str) -> Callable[[CommandT], CommandT]:
    """How many requests of the trace are taken."""
    return click.option("--requests", type=click.IntRange(min=1), show_default="all", help=help)


def seed_option(help: str) -> Callable[[CommandT], CommandT]:
    """What random numbers begin with."""
    return click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, help=help)


def file_option(flag: str, help: str) -> Callable[[CommandT], CommandT]:
    """A file to write; its parameter is `flag` and ``_path``."""
    return click.option(flag, f"{flag.removeprefix('--')}_path", type=FILE, help=help)


def gathered(record: type[GivenT]) -> Callable[[Callable[[GivenT], int]], Callable[..., int]]:
    """Makes a function of one `record` a command: the fields are named as the parameters of its options."""

    def decorate(run: Callable[[GivenT], int]) -> Callable[..., int]:
        @wraps(run)
        def command(**given: Any) -> int:  # noqa: ANN401  # what click made of the words, by its own types
            return run(record(**given))

        return command

    return decorate
