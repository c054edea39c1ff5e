"""Entry point of the group ``sglang.srt.plugins``, in every process that SGLang starts: all that is ours, or nothing.

SGLang logs what a plugin raises and goes on without it. So nothing of SGLang's is imported at the top of this module,
and where SGLang's names are not those that we know, no hook is registered: our flags are answered with one line, before
anything is started, and a server without them is left alone.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
from typing import Final

from ..seam.installed import installed_release, unsupported
from . import options
from .choice import KEYWORDS

_PARSER: Final = "sglang.srt.server_args.ServerArgs.add_cli_args"

logger = logging.getLogger(__name__)


def register() -> None:
    """Register everything; SGLang applies the hooks afterwards. If that cannot be, our flags are refused."""
    try:
        from .hook_table import register_all

        register_all()
    except Exception as error:  # names that moved may raise anything
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if multiprocessing.parent_process() is None:
            logger.warning("sglang-kv-layouts does not fit SGLang %s and is off: %s", installed_release(), reason)
        refuse_flags(unsupported() or f"does not fit this SGLang: {reason}; see kvlayouts check, or drop the flag")


def refuse_flags(refusal: str) -> None:
    """Answer our flags with `refusal`: by `SystemExit` if the command line has one, else where one comes later."""
    for argument in sys.argv[1:]:
        flag = argument.partition("=")[0]
        if flag in KEYWORDS.values():
            raise SystemExit(f"error: {flag}: {refusal}")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        _PARSER, lambda _result, parser: options.add_to_parser(parser, refusal=refusal), HookType.AFTER
    )
    options.add_to_engine(options.refusing_factory(refusal))
