"""Our flags on SGLang's command line, config file and `Engine`, and the check before anything is spawned.

Each function here is a hook on a function of SGLang's (`plugin` says which). Without our flags each of them hands
SGLang's own result on.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.arg_groups.overrides import post_capture_kv_sizing_planned

from sglang.srt.mem_cache.layouts.config import DEFAULT_LAYOUT
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError
from sglang.srt.mem_cache.layouts.facts import shares_pages_out

from ..seam.installed import unsupported
from ..seam.server_flags import attention_groups
from .choice import KEYWORDS, RADIX_BACKEND, STRATEGY_FLAG, attach_choice, choice_of, choose
from .facts import ServerFacts
from .graphs import phases_asked_for, phases_with_graphs, turn_graphs_off
from .hooks import missing_hooks, refuse_missing_hooks
from .options import add_to_parser
from .refusals import refuse_stripes, refuse_what_does_not_fit, scopes_of
from .values import refuse_sizes, refuse_values

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from sglang.srt.server_args import ServerArgs

    from .choice import LayoutChoice


logger = logging.getLogger(__name__)


def add_options(_result: None, parser: argparse.ArgumentParser) -> None:
    """After ``ServerArgs.add_cli_args``: three more options, refused where not every hook is in place."""
    add_to_parser(parser, refusal=missing_hooks())


def read_options(
    original: Callable[[type[ServerArgs], argparse.Namespace], ServerArgs],
    cls: type[ServerArgs],
    args: argparse.Namespace,
) -> ServerArgs:
    """Around ``ServerArgs.from_cli_args``: record the choice. `LayoutConfigError` for flags that make no sense."""
    strategy, config, cp_shared = (getattr(args, keyword, None) for keyword in KEYWORDS)
    choice = choose(strategy, config, enable_cp_shared=bool(cp_shared))
    return _with_choice(original(cls, args), choice)


def keyword_factory(original: Callable[..., ServerArgs]) -> Callable[..., ServerArgs]:
    """`Engine.server_args_class` that takes our keywords besides those of `ServerArgs`."""

    def build(*positional: object, **keywords: Any) -> ServerArgs:  # noqa: ANN401  # ServerArgs' own keywords
        strategy, config, cp_shared = (keywords.pop(keyword, None) for keyword in KEYWORDS)
        choice = choose(strategy, config, enable_cp_shared=bool(cp_shared))
        return _with_choice(original(*positional, **keywords), choice)

    return build


def check(original: Callable[[ServerArgs], None], server_args: ServerArgs) -> None:
    """Around ``ServerArgs.check_server_args``, in the parent: refuse what does not fit, name what is unusual.

    Numbers that SGLang's own check divides by are judged before it, all else after it. A strategy that shares pages
    out over a group of one rank becomes `identity`, with a warning. Raises `LayoutConfigError`, with nothing spawned.
    """
    choice = choice_of(server_args)
    if choice is None:
        original(server_args)
        return
    refuse_sizes(resolving_view(server_args))
    original(server_args)
    refuse_unsupported_release(choice.asked)
    refuse_missing_hooks(choice.asked)
    facts = server_facts(server_args)
    layout = choice.create_group(page_size=facts.args.page_size, shard_size=facts.shard_size)[0]
    refuse_stripes(layout, choice.asked)
    if facts.shard_size == 1 and choice.wants_peers(facts.args.page_size):
        logger.warning(
            "%s: the shard group has one rank (--tp-size %d), so there is nothing to share; using %s %s",
            choice.asked,
            facts.args.tp_size,
            STRATEGY_FLAG,
            DEFAULT_LAYOUT,
        )
        choice = dataclasses.replace(choice, strategy=DEFAULT_LAYOUT, options={}, flag=STRATEGY_FLAG)
        attach_choice(server_args, choice)
    for warning in refuse_what_does_not_fit(facts, choice.asked, scopes_of(layout)):
        logger.warning("%s", warning)
    refuse_values(facts)
    if facts.graphs_on and shares_pages_out(layout):
        turn_graphs_off(server_args)


def server_facts(server_args: ServerArgs) -> ServerFacts:
    """What the table of `refusals` asks about. Reads the model's configuration, not its weights."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.utils import is_cuda

    from ..cpu.support import accelerator_present
    from .models import model_facts

    args = resolving_view(server_args)
    return ServerFacts(
        args=args,
        model=model_facts(model_config_of(server_args), args.kv_cache_dtype),
        shard_size=shard_size(args),
        on_cpu=not accelerator_present(),
        on_nvidia=is_cuda(),
        graphs_on=accelerator_present() and bool(phases_with_graphs(server_args)),
        graphs_asked_for=accelerator_present() and bool(phases_asked_for(server_args)),
        pool_shrinks=post_capture_kv_sizing_planned(server_args),
    )


def shard_size(args: Any) -> int:  # noqa: ANN401  # any view of ServerArgs
    """Ranks of the shard group: the attention-CP group if it has peers, else the attention-TP group."""
    if args.attn_cp_size > 1:
        return int(args.attn_cp_size)
    return max(int(args.tp_size) // attention_groups(args), 1)


def refuse_unsupported_release(asked: str) -> None:
    """Raise `LayoutConfigError` unless the SGLang release is one that this distribution was written for."""
    if (wrong := unsupported()) is not None:
        raise LayoutConfigError(f"{asked} {wrong}")


def _with_choice(server_args: ServerArgs, choice: LayoutChoice | None) -> ServerArgs:
    if choice is not None:
        attach_choice(server_args, choice)
        if server_args.radix_cache_backend is None:  # another one is refused by `check`
            server_args.radix_cache_backend = RADIX_BACKEND
    return server_args
