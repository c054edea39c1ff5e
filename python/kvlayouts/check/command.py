"""`kvlayouts check`: one line a check."""

from __future__ import annotations

import click

from kvlayouts.common.alone import rejoin


@click.command()
def check() -> int:
    """Check that this installation and SGLang fit together; exit status 1 if something does not."""
    rejoin()  # strategies of other distributions are built too
    from sglang.srt.mem_cache.hicache.check.installation import check_installation

    passed = True
    for line in check_installation():
        click.echo(str(line))
        passed = passed and line.passed
    return 0 if passed else 1
