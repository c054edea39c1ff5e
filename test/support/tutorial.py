"""The code blocks of docs/tutorial.md, and what its commands print."""

from __future__ import annotations

import re
from dataclasses import dataclass

from support.third_party import REPOSITORY

_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: its language, its title (a file, or empty) and its text."""

    language: str
    title: str
    text: str


def blocks(language: str = "") -> list[Block]:
    """The page's blocks in order, of one language or of all."""
    page = (REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8")
    found = [Block(language=kind, title=title, text=text) for kind, title, text in _BLOCK.findall(page)]
    return [block for block in found if language in ("", block.language)]


def commands() -> list[tuple[str, list[str]]]:
    """Every command line that the page shows, in order, and the lines that it shows as its output."""
    return [
        (command, output.splitlines())
        for block in blocks("console")
        for command, output in _COMMAND.findall(block.text)
    ]


def outputs(start: str) -> list[list[str]]:
    """What the page shows for the commands that begin with `start`."""
    return [output for command, output in commands() if command.startswith(start)]
