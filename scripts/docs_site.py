"""What `make docs` needs beside mkdocs.yml: the API reference, and links from docs/ to the rest of the repository.

- Each public module of our packages gets a page that mkdocstrings fills from its docstrings, without importing it.
- A link such as `../CONTRIBUTING.md` works in the repository; here the file is taken into the site and the link mended.
  Links from such a file back into docs/ are mended as well.
- Pages name sources as they lie in the repository.
- The built pages are searched for anything that a browser would fetch from elsewhere.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, InclusionLevel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
NAMESPACE = "sglang.srt.mem_cache"
PYTHON = ROOT / "python"
BASE = PYTHON / NAMESPACE.replace(".", "/")
PACKAGES = {"layouts": BASE, "hicache": BASE, "kvlayouts": PYTHON}
"""The folder that each package lies in."""

SOURCES = ROOT / "build/docs-sources"
"""What mkdocs.yml tells mkdocstrings to read."""

DOCS, OUTSIDE = "docs", "repository"
"""Folder of the documentation in the repository; folder of the site that holds files from outside of it."""

FENCE = re.compile(r"^(`{3,}).*?^\1$", re.MULTILINE | re.DOTALL)
MARKED = re.compile(r"^(`{3,}\w+) \w+$", re.MULTILINE)
"""The first line of a block with a word for our tests beside its language; MkDocs would not take it for a block."""

LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)[^>]*\ssrc=["']?(?:https?:)?//|"""
    r"""<link[^>]*rel=["']?(?:stylesheet|preload|preconnect|icon)["'\s][^>]*href=["']?(?:https?:)?//|"""
    r"""@import|url\(["']?(?:https?:)?//"""
)


def on_startup(command: str, dirty: bool) -> None:
    """Lay the sources out with a package `sglang` that holds ours alone.

    Below python/ it is a namespace, so the installed SGLang, a package of that name, would be read in its place.
    """
    if SOURCES.exists():
        shutil.rmtree(SOURCES)
    for package, base in PACKAGES.items():
        for path in (base / package).rglob("*.py"):
            copy = SOURCES / path.relative_to(PYTHON)
            copy.parent.mkdir(parents=True, exist_ok=True)
            # A docstring's `::` before an indented block means something to others, not to Markdown.
            copy.write_text(path.read_text(encoding="utf-8").replace("::\n", ":\n"), encoding="utf-8")
    for folder in ("sglang", "sglang/srt", "sglang/srt/mem_cache"):
        (SOURCES / folder / "__init__.py").touch()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the generated pages to the navigation."""
    reference = [{package: _nav(package)} for package in PACKAGES]
    nav: list[Any] = config.nav or []
    notes = sorted(path.relative_to(ROOT / DOCS).as_posix() for path in (ROOT / DOCS / "design").glob("*.md"))
    contributing = f"{OUTSIDE}/CONTRIBUTING.md"
    config.nav = [*nav, {"Design notes": notes}, {"API reference": reference}, {"Contributing": contributing}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each module, and the files outside of docs/ that a page links to."""
    script = str(ROOT / "scripts/iframe-worker.js")
    files.append(File.generated(config, "assets/iframe-worker.js", abs_src_path=script))
    for package in PACKAGES:
        for module in _modules(package):
            name = module if PACKAGES[package] == PYTHON else f"{NAMESPACE}.{module}"
            content = f"---\ntitle: {module.rpartition('.')[2]}\n---\n\n::: {name}\n"
            files.append(File.generated(config, _page_of(module), content=content))
    pages = [file.src_uri for file in files.documentation_pages() if file.abs_src_path]
    waiting = ["CONTRIBUTING.md", *(f"{DOCS}/{uri}" for uri in pages)]
    seen: set[str] = set()
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        if not place.startswith(f"{DOCS}/"):
            file = File.generated(config, _site_path(place), abs_src_path=str(ROOT / place))
            file.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(file)
        if place.endswith(".md"):
            text = (ROOT / place).read_text(encoding="utf-8")
            waiting += [target for target in _targets(place, text) if not target.startswith(f"{DOCS}/")]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mend the links of a page that lead out of docs/, or into it from outside."""
    uri = page.file.src_uri
    place = uri.removeprefix(f"{OUTSIDE}/") if uri.startswith(f"{OUTSIDE}/") else f"{DOCS}/{uri}"
    here = posixpath.dirname(uri)

    def mend(match: re.Match[str]) -> str:
        target = _resolve(place, match[2])
        if not (ROOT / target).exists():
            return match[0]  # MkDocs complains
        return f"{match[1]}{posixpath.relpath(_site_path(target), here or '.')}{match[3]}"

    parts = (MARKED.sub(r"\1", part) if code else LINK.sub(mend, part) for code, part in _split(markdown))
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name sources as they lie in the repository, not in the copy that was read."""
    return html.replace(f"{_in_repository(SOURCES)}/", f"{_in_repository(PYTHON)}/")


def on_post_build(config: MkDocsConfig) -> None:
    """Raise `PluginError` where a page names our copy of the sources, or would fetch something from another host."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in {".html", ".css", ".json", ".js"}:
            text = path.read_text(encoding="utf-8")
            if _in_repository(SOURCES) in text:
                raise PluginError(f"{path}: names {_in_repository(SOURCES)}, which is no folder of the repository")
            if path.suffix in {".html", ".css"} and (found := FETCHED.search(text)):
                raise PluginError(f"{path}: fetches from elsewhere: {found[0]}")


def _in_repository(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _targets(place: str, text: str) -> Iterator[str]:
    """Files of the repository that a page links to; a folder stands for its README.md."""
    for code, part in _split(text):
        for match in () if code else LINK.finditer(part):
            target = _resolve(place, match[2])
            if (ROOT / target).is_file():
                yield target


def _split(text: str) -> Iterator[tuple[bool, str]]:
    """The text in pieces, each with whether it is a block of code."""
    position = 0
    for match in FENCE.finditer(text):
        yield False, text[position : match.start()]
        yield True, match[0]
        position = match.end()
    yield False, text[position:]


def _resolve(place: str, link: str) -> str:
    target = posixpath.normpath(posixpath.join(posixpath.dirname(place), link))
    return f"{target}/README.md" if (ROOT / target / "README.md").is_file() else target


def _site_path(place: str) -> str:
    """Where a file of the repository lies in the site."""
    return place.removeprefix(f"{DOCS}/") if place.startswith(f"{DOCS}/") else f"{OUTSIDE}/{place}"


def _modules(package: str) -> Iterator[str]:
    """Public modules with their packages' names, each package before what is in it."""
    base = PACKAGES[package]
    paths = (base / package).rglob("*.py")
    for path in sorted(paths, key=lambda path: (path.parent, path.name != "__init__.py", path)):
        parts = path.relative_to(base).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        public = not any(part.startswith("_") for part in parts)
        if public and path.stat().st_size and path.with_name("__init__.py").exists():
            yield ".".join(parts)


def _page_of(module: str) -> str:
    """The page of a module; that of a package is the index of its section."""
    path = module.replace(".", "/")
    return f"api/{path}/index.md" if (PACKAGES[module.partition(".")[0]] / path).is_dir() else f"api/{path}.md"


def _nav(package: str) -> list[Any]:
    """The pages of one package, then a group for each package below it."""
    groups: dict[str, list[str]] = {}
    for module in _modules(package):
        page = _page_of(module)
        package_of_page = page.removeprefix("api/").rpartition("/")[0].replace("/", ".")
        groups.setdefault(package_of_page, []).append(page)
    own = groups.pop(package)
    return [*own, *({name.removeprefix(f"{package}."): pages} for name, pages in groups.items())]
