"""README and docs/ name nothing that is not there: links, files, options, and no place outside the repository.

Reads text, and asks the commands for their options. It does not load SGLang, not even to register with its CI, so that
it answers at once.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvlayouts.main import cli

ROOT = Path(__file__).parents[4]
PACKAGES = ROOT / "python/sglang/srt/mem_cache"  # `layouts/...` and `hicache/...` are short for files below it
EXAMPLE = ROOT / "examples/keyed-layout"  # the package that docs/tutorial.md builds
FOLDERS = ("docs/**", "changes", "benchmark/results")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md"))])
PAGES = [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in DOCUMENTS]
# The changelog and measurements tell of the past: files may have another name now.
PRESENT = [page for page in PAGES if not str(page.id).startswith(("CHANGELOG", "benchmark/results/2"))]

FENCE = re.compile(r"^(`{3,}).*?^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w.-]+(/[\w.-]+)*\.(py|pyi|md|toml|ini|txt|sh|svg|png|jsonl)|([\w.-]+/)+")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)

# Inputs and outputs of commands that a document shows, made up for the example.
EXAMPLES = {"broken.jsonl", "short.jsonl", "my-trace.jsonl", "nowhere.jsonl"}
# Generic files and folders: an environment, a name with a placeholder.
GENERATED = {".venv/bin/", "layouts/", "hicache/"}

HOST = re.compile(r"\b(?:[a-z0-9-]+\.)+(?:org|com|net|io|co|dev|ai|edu|cn)\b", re.IGNORECASE)
ABSOLUTE_PATH = re.compile(r"(?<![\w.\])}~/<])/[A-Za-z_.][\w.-]*/[\w.-]")


def _prose(path: Path) -> str:
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def _anchor(heading: str) -> str:
    """The fragment that a heading gets on a code host."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_to_a_file_and_a_heading_of_this_repository(page: Path) -> None:
    for link in LINK.findall(_prose(page)):
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        assert target.exists(), f"{link} leads nowhere"
        if fragment:
            headings = {_anchor(heading) for heading in HEADING.findall(_prose(target))}
            assert fragment in headings, f"{link}: no such heading"


@pytest.mark.parametrize("page", PRESENT)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    for name in CODE.findall(_prose(page)):
        if not FILE.fullmatch(name) or name in EXAMPLES | GENERATED:
            continue
        found = any((base / name).exists() for base in (ROOT, ROOT / "python", PACKAGES, page.parent, EXAMPLE))
        # A name without a folder may stand for a file of any folder.
        folders = (ROOT / "python", ROOT / "test", EXAMPLE)
        found = found or ("/" not in name and any(any(folder.rglob(name)) for folder in folders))
        assert found, f"{name} does not exist"


@pytest.mark.parametrize("page", PAGES)
def test_no_page_names_a_host_or_a_path_of_one_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not HOST.findall(text), "a host"
    assert not ABSOLUTE_PATH.findall(text), "an absolute path"
    assert "://" not in text, "a URL"


def _options(command: str) -> set[str]:
    return {flag for parameter in cli.commands[command].params for flag in parameter.opts if flag.startswith("--")}


@pytest.mark.parametrize("command", ["replay", "explain", "plan", "bench"])
def test_a_guide_describes_exactly_the_options_of_its_command(command: str) -> None:
    options = _options(command)
    assert len(options) > 3, f"the options of {command} were not found"
    guide = (ROOT / f"docs/{command}.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| Option \|.*\n(?:\|.*\n)+", guide, re.MULTILINE)
    described = [
        option
        for cell in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
        for option in re.findall("`(--[^`]+)`", cell)
    ]
    assert sorted(described) == sorted(options)


@pytest.mark.parametrize("page", PAGES)
def test_every_replay_command_that_a_page_shows_uses_options_that_exist(page: Path) -> None:
    options = _options("replay")
    for line in re.findall(r"kvlayouts replay ([^`\n#]*)", page.read_text(encoding="utf-8")):
        if "--" in line:
            used = {word for word in shlex.split(line.replace("'", " ")) if re.fullmatch(r"--[a-z-]+", word)}
            assert used <= options, f"kvlayouts replay {line}: {used - options}"


def test_the_index_leads_to_every_page_of_the_documentation() -> None:
    index = ROOT / "docs/README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(_prose(index))}
    missing = [page.name for page in ROOT.glob("docs/**/*.md") if page != index and page.resolve() not in linked]
    assert not missing


def test_change_fragments_are_named_by_their_kind_and_hold_one_paragraph() -> None:
    for fragment in ROOT.glob("changes/*.md"):
        if fragment.name == "README.md":
            continue
        assert re.fullmatch(r"[a-z0-9-]+\.(feature|fix|doc)\.md", fragment.name)
        assert len(fragment.read_text(encoding="utf-8").strip().splitlines()) == 1, fragment.name
