"""`kvlayouts`: the command line.

Exit status: 0; 1 for a mismatch, ranks that disagree or a run that failed; 2 for bad input; 128 and the number of a
signal that ended it, or 141 where nobody reads what it writes (`endings`). All but the last end with one line
on stderr. Nothing here loads SGLang, PyTorch, numpy or rich: help and most mistakes are told without them.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, Final

import click
from typing_extensions import override

from kvlayouts.bench.command import bench
from kvlayouts.check.command import check
from kvlayouts.common.endings import EXIT_READER_GONE, behind, drop_unread_output, interrupt_status, open_closed_streams
from kvlayouts.common.errors import InputError, RunError
from kvlayouts.common.own_flags import options_of, own_words
from kvlayouts.explain.command import explain
from kvlayouts.plan.command import plan
from kvlayouts.replay.command import replay
from kvlayouts.soak.command import soak

if TYPE_CHECKING:
    from collections.abc import Sequence

DISTRIBUTION: Final = "sglang-kv-layouts"

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_BAD_INPUT: Final = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; `argv` is `sys.argv[1:]` where it is None."""
    open_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # pictures and names may hold what the terminal does not know
    try:
        status = cli.main(args=None if argv is None else list(argv), prog_name="kvlayouts", standalone_mode=False)
    except click.ClickException as error:
        return _fail(error.format_message(), EXIT_BAD_INPUT)
    except InputError as error:
        return _fail(str(error), EXIT_BAD_INPUT)
    except RunError as error:
        return _fail(str(error), EXIT_FAILED)
    except MemoryError as error:
        return _fail(f"not enough memory: {error}", EXIT_FAILED)
    except (click.Abort, OSError, SystemExit) as error:
        return _ended_early(error)
    return status if isinstance(status, int) else EXIT_OK


def _ended_early(error: click.Abort | OSError | SystemExit) -> int:
    """The exit status after an interrupt, a closed pipe (where rich and click exit, and only there), or an error."""
    interrupt = behind(error, KeyboardInterrupt)
    if interrupt is not None or isinstance(error, click.Abort):
        return _fail(str(interrupt or "") or "interrupted", interrupt_status(interrupt))
    if isinstance(error, OSError) and behind(error, BrokenPipeError) is None:
        return _fail(": ".join(filter(None, (error.filename, error.strerror or str(error)))), EXIT_FAILED)
    drop_unread_output()
    return EXIT_READER_GONE


def _fail(message: str, status: int) -> int:
    with suppress(OSError):  # nobody may be there to read it
        print(f"kvlayouts: error: {' '.join(message.split())}", file=sys.stderr)
    drop_unread_output()
    return status


def _version(context: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if not asked or context.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version(DISTRIBUTION)
    except PackageNotFoundError:
        found = "(not installed)"
    click.echo(f"kvlayouts, version {found}")
    context.exit()


class _CommandInItsOwnWords(click.Group):
    """Says what failed with the flags of the command, also where a rank failed with words of a server."""

    @override
    def invoke(self, ctx: click.Context) -> object:
        """Run the command that `ctx` names."""
        try:
            return super().invoke(ctx)
        except RunError as error:
            name = ctx.invoked_subcommand
            command = None if name is None else self.get_command(ctx, name)
            if command is not None:
                error.args = (own_words(str(error), options_of(command)), *error.args[1:])
            raise


@click.group(
    cls=_CommandInItsOwnWords,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version and exit."
)
def cli() -> None:
    """KV layout strategies for SGLang's hierarchical KV cache."""


for _command in (replay, check, explain, plan, soak, bench):
    cli.add_command(_command)


if __name__ == "__main__":
    sys.exit(main())
