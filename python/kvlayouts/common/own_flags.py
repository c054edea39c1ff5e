"""A server's flags in the words of the command that runs: what is refused names what its user can change.

Strategies, pools and the table of refusals speak of SGLang's flags. A command has other names for the same settings, or
none; which of them it has is read from the command itself.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

SAME_SETTING: Final[Mapping[str, tuple[str, ...]]] = {
    "--kv-layout-strategy": ("--layout",),
    "--kv-layout-config": ("--layout-config",),
    "--model-path": ("--model-config",),
    "--tp-size": ("--gpus", "--ranks", "--cp-size"),
    "--attention-context-parallel-size": ("--cp-size", "--ranks"),
    "--hicache-ratio": ("--host-ratio",),
    "--hicache-size": ("--host-gb",),
    "--hicache-write-policy": ("--policy",),
    "--hicache-mem-layout": ("--host-mem-layout",),
    "--radix-eviction-policy": ("--eviction-policy",),
}
"""A server's flag, and the options that set the same thing; of those that a command has, the first."""

_FLAG: Final = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def in_own_words(error: Exception) -> str:
    """The message of a strategy or of the server's table, with the options of the command that runs in it."""
    return own_words(str(error), own_options())


def own_options() -> frozenset[str] | None:
    """The options of the command that runs; None outside of one."""
    context = click.get_current_context(silent=True)
    if context is None:
        return None
    return options_of(context.command)


def options_of(command: click.Command) -> frozenset[str]:
    """The options that `command` takes."""
    return frozenset(name for parameter in command.params for name in parameter.opts)


def own_words(message: str, options: frozenset[str] | None) -> str:
    """`message` with each flag of a server replaced by the one of `options` that sets the same.

    A flag that has no such option stays, as a server's. Without a command every option is taken to be there.
    """

    def own(found: re.Match[str]) -> str:
        flag = found.group()
        if options is None:
            return SAME_SETTING.get(flag, (flag,))[0]
        named = next((option for option in (flag, *SAME_SETTING.get(flag, ())) if option in options), None)
        return named or f"a server's {flag}"

    return _FLAG.sub(own, message)
