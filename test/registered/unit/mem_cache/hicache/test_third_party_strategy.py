"""A strategy of another distribution, as its author and its users meet it; and the tutorial that tells its story."""

from __future__ import annotations

import doctest
import hashlib
import importlib
import re
import shlex
import sys
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci

from kvlayouts.main import main
from sglang.srt.mem_cache.hicache.check import installation
from sglang.srt.mem_cache.hicache.server import args as server_args
from sglang.srt.mem_cache.hicache.server.choice import choice_of
from sglang.srt.mem_cache.hicache.server.facts import ModelFacts, ServerFacts
from sglang.srt.mem_cache.layouts import LayoutConfigError
from sglang.srt.mem_cache.layouts.registry import known_layouts
from support.fork_server import forking_context_for_tests
from support.third_party import EXAMPLE, REPOSITORY, ThirdParty, entry_points_of, make_third_party
from support.tutorial import blocks, commands, outputs

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

register_cpu_ci(est_time=150, suite="base-a-test-cpu")
pytestmark = pytest.mark.timeout(300)

FILES = (
    "pyproject.toml",
    "src/keyed_layout/__init__.py",
    "src/keyed_layout/keys.py",
    "src/keyed_layout/layout.py",
    "tests/test_contract.py",
)
LAYOUT_FILE = FILES[3]
PIP_INSTALL = "pip install --no-deps --no-build-isolation -e keyed-layout"
EDITABLE_MYPY = "MYPYPATH=$CHECKOUT/python mypy "
LAUNCH = "python -m sglang.launch_server "


@pytest.fixture(scope="module")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> ThirdParty:
    """The example package, installed beside SGLang and this distribution, and a copy of its sources."""
    return make_third_party(tmp_path_factory.mktemp("third-party"))


@pytest.fixture
def installed(third_party: ThirdParty, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sees the example package, as if it were installed."""
    monkeypatch.syspath_prepend(str(third_party.site))
    importlib.invalidate_caches()


@pytest.fixture(scope="module")
def mypy_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache that outlives the run, where pytest keeps one: reading torch's types takes mypy most of its time."""
    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    return str(cache.mkdir("third-party-mypy") if cache else tmp_path_factory.mktemp("third-party-mypy"))


# The page and the package.


def test_the_code_on_the_page_is_the_packages() -> None:
    excerpts = (*blocks("toml"), *blocks("python"))
    assert len(excerpts) > 5
    for block in excerpts:
        assert block.title in FILES
        assert block.text.rstrip() in (EXAMPLE / block.title).read_text(encoding="utf-8"), block.text


def test_no_block_and_no_command_of_the_page_goes_unchecked() -> None:
    assert {block.language for block in blocks()} <= {"toml", "python", "pycon", "console", "diff", "text"}
    assert [block.title for block in blocks("text")] == ["", "mypy in a checkout"]  # the first is a list of files
    checked = (PIP_INSTALL, "pytest ", "mypy ", EDITABLE_MYPY, "kvlayouts check", "kvlayouts replay ", LAUNCH)
    assert [command for command, _ in commands() if not command.startswith(checked)] == []
    assert all(outputs(start) for start in checked[1:])


def test_the_tree_of_files_on_the_page_is_the_packages() -> None:
    listed = re.findall(r"([\w.]+\.\w+)", blocks("text")[0].text)
    assert sorted(listed) == sorted([*(name.split("/")[-1] for name in FILES), "py.typed"])


@pytest.mark.usefixtures("installed")
def test_plans_and_keys_are_what_the_page_shows() -> None:
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks("pycon")):
        example = doctest.DocTestParser().get_doctest(block.text, names, f"block {number}", None, None)
        assert example.examples
        runner = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST)
        heard: list[str] = []
        runner.run(example, out=heard.append, clear_globs=False)
        assert not runner.failures, "".join(heard)
        names.update(example.globs)


# As its author meets it.


@pytest.mark.slow
def test_its_tests_pass_in_an_environment_of_its_own(third_party: ThirdParty, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    done = third_party.run("pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout
    cases = [case.get("classname", "") for case in ET.parse(report).iter("testcase")]
    contract = sum(name.startswith("tests.test_contract.") for name in cases)
    assert {name.split(".")[1] for name in cases} == {"test_contract", "test_keys", "test_layout"}
    assert _without_seconds(outputs("pytest ")[0][-1:]) == [f"{contract} passed in"]


def test_the_contract_suite_says_of_the_mistake_what_the_page_shows(third_party: ThirdParty) -> None:
    (mistake,) = blocks("diff")
    layout = _module(third_party, "wrong_layout", _patched(mistake.text))
    contract = _module(third_party, "contract", (EXAMPLE / "tests" / "test_contract.py").read_text(encoding="utf-8"))
    contract.__dict__["KeyedLayout"] = layout.KeyedLayout
    suite = contract.TestKeyedContract()
    suite.max_examples = 5
    failed = {}
    for name in (name for name in dir(suite) if name.startswith("test_")):
        try:
            getattr(suite, name)()
        except AssertionError as error:
            failed[name] = [line.rstrip() for line in str(error).splitlines()]
    shown = outputs("pytest ")[1]
    ((name, message),) = failed.items()
    told = [line[1:].strip() for line in shown if line.startswith("E ")]
    said = iter(["AssertionError:", *(line.strip() for line in message if line)])
    assert all(line in said for line in told), "the page's lines, in this order"
    assert len(told) > 3
    assert f"FAILED tests/test_contract.py::TestKeyedContract::{name}" in shown


@pytest.mark.slow
def test_mypy_strict_sees_the_types_of_an_installed_distribution_and_finds_a_misuse(
    third_party: ThirdParty, mypy_cache: str
) -> None:
    done = third_party.run("mypy", "--cache-dir", mypy_cache)
    assert done.stdout.splitlines()[-1:] == ["Success: no issues found in 6 source files"], done.stdout + done.stderr
    source = third_party.sources / LAYOUT_FILE
    right = source.read_text(encoding="utf-8")
    try:
        source.write_text(right.replace("lanes: LaneArray) -> list[str]", "lanes: int) -> list[str]"), encoding="utf-8")
        done = third_party.run("mypy", "--cache-dir", mypy_cache)
    finally:
        source.write_text(right, encoding="utf-8")
    assert done.returncode == 1
    assert '"StorageAwareLayout"' in done.stdout
    assert "import-untyped" not in done.stdout


def test_mypy_needs_one_setting_where_this_distribution_is_installed_in_editable_mode(
    third_party: ThirdParty, mypy_cache: str
) -> None:
    if "kv_layouts" not in " ".join(getattr(finder, "__module__", "") for finder in sys.meta_path):
        pytest.skip("this distribution is not installed in editable mode")
    files = shlex.split(next(command for command, _ in commands() if command.startswith("mypy ")))[1:]
    arguments = ("mypy", "--cache-dir", mypy_cache, "--python-executable", sys.executable, *files)
    (told,) = (block.text.splitlines() for block in blocks("text") if block.title)
    without = third_party.run(*arguments)
    assert without.stdout.splitlines()[:1] == told
    done = third_party.run(*arguments, MYPYPATH=str(REPOSITORY / "python"))
    shown = outputs("mypy ") + outputs(EDITABLE_MYPY)
    assert len(shown) == 2
    assert all(output == done.stdout.splitlines() for output in shown), done.stdout


# As its users meet it.


@pytest.mark.usefixtures("installed")
def test_check_lists_it(third_party: ThirdParty, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry_points_of(third_party.site) == {"keyed": "keyed_layout:KeyedLayout.from_config"}
    assert "keyed" in known_layouts()
    (check,) = (check for check in installation._CHECKS if check[0] == "layout strategies")  # noqa: SLF001  # one of six
    with mock.patch.object(installation, "_CHECKS", (check,)):
        assert main(["check"]) == 0
    said = capsys.readouterr().out.splitlines()
    (shown,) = outputs("kvlayouts check")
    assert [line for line in shown if line != "..." and line not in said] == []


@pytest.mark.usefixtures("installed")
def test_explain_draws_its_stripes(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"`kvlayouts (explain [^`]*)`", page)
    assert main(shlex.split(command)) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("lane (owner)"))
    lanes = [int(lane) for lane in row.split()[2:]]
    assert len(lanes) == 10
    assert [page for page in range(1, 10) if lanes[page] != lanes[page - 1]] == [4, 8]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("installed")
def test_replay_prints_the_lines_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forking_context_for_tests()
    monkeypatch.setenv("COLUMNS", "100")
    ((command, shown),) = [(line, output) for line, output in commands() if line.startswith("kvlayouts replay ")]
    assert main(shlex.split(command)[1:]) == 0
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len(shown) > 5
    assert [line for line in shown if line != "..." and line not in said] == []


@pytest.mark.usefixtures("installed")
def test_a_server_takes_it_with_its_settings() -> None:
    record = _checked(
        "--kv-layout-strategy keyed --hicache-io-backend direct --attention-backend torch_native"
        """ --kv-layout-config '{"stripe_pages": 8, "store": "bf16"}' --tp-size 2 --page-size 64"""
        " --enable-hierarchical-cache --hicache-ratio 2 --hicache-mem-layout layer_first"
    )
    choice = choice_of(record)
    assert choice is not None
    layout = cast("Any", choice.create(page_size=64, shard_size=2, shard_rank=1))
    assert type(layout).__module__ == "keyed_layout.layout"
    assert (layout.stripe_pages, layout.store, layout.lane) == (8, "bf16", 1)


@pytest.mark.usefixtures("installed")
def test_a_server_refuses_in_the_words_of_the_page() -> None:
    launches = [(command, output) for command, output in commands() if command.startswith(LAUNCH)]
    ((command, shown),) = launches
    with pytest.raises(LayoutConfigError) as caught:
        _checked(command.removeprefix(LAUNCH))
    assert ["...", f"{LayoutConfigError.__module__}.LayoutConfigError: {caught.value}"] == shown
    flags = command.removeprefix(LAUNCH).partition(" --kv-layout-config")[0]
    with pytest.raises(LayoutConfigError, match="keyed does not go together with --hicache-storage-backend"):
        _checked(f"{flags} --hicache-storage-backend file")


@pytest.mark.usefixtures("installed")
def test_sglangs_file_backend_keeps_what_all_ranks_store_under_its_keys_and_gives_it_to_any(tmp_path: Path) -> None:
    storage: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")  # not in our stubs
    fixed = {"tp_size": 4, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": True}
    names = {"model_name": "org/model", "enable_storage_metrics": False, "is_page_first_layout": False}
    backends = [
        storage.HiCacheFile(storage.HiCacheStorageConfig(tp_rank=rank, **fixed, **names), str(tmp_path))
        for rank in range(4)
    ]
    group = _make_group(shard_size=4)
    lanes = group[0].extend_lanes(1, 0, 11)
    hashes = [hashlib.sha256(bytes([page])).hexdigest() for page in range(len(lanes))]
    for layout, backend in zip(group, backends, strict=True):
        for key, page in zip(layout.storage_keys(hashes, lanes), np.flatnonzero(lanes == layout.lane), strict=True):
            assert backend.set(key, torch.full((16,), int(page), dtype=torch.uint8))
    assert len(list(tmp_path.glob("*.bin"))) == len(hashes)
    for number, (page_hash, lane) in enumerate(zip(hashes, lanes, strict=True)):
        for layout, backend in zip(group, backends, strict=True):
            found = backend.get(str(layout.page_key(page_hash, int(lane))), torch.empty(16, dtype=torch.uint8))
            assert found.unique().tolist() == [number]
        assert not backends[0].exists(str(_make_group(shard_size=8)[0].page_key(page_hash, int(lane))))


def _make_group(shard_size: int) -> list[Any]:
    keyed: Any = importlib.import_module("keyed_layout")
    return [keyed.KeyedLayout(page_size=64, shard_size=shard_size, shard_rank=rank) for rank in range(shard_size)]


def _checked(flags: str) -> Any:  # noqa: ANN401  # ServerArgs
    """What SGLang makes of `flags`, after our check before the launch; only the model's configuration is given."""
    load_plugins()
    sglang: Any = importlib.import_module("sglang.srt.server_args")  # not in our stubs
    arguments = shlex.split(flags)
    record = sglang.prepare_server_args(["--model-path", "none", *arguments])
    facts = ServerFacts(args=resolving_view(record), model=ModelFacts(), shard_size=2, on_cpu=True)
    with mock.patch.object(server_args, "server_facts", return_value=facts):
        server_args.check(lambda _: None, record)
    return record


def _module(third_party: ThirdParty, name: str, source: str) -> ModuleType:
    """A module of the installed package with other source."""
    sys.path.insert(0, str(third_party.site))
    try:
        package = importlib.import_module("keyed_layout")
    finally:
        sys.path.remove(str(third_party.site))
    module = type(package)(f"{package.__name__}.{name}")
    module.__package__ = package.__name__
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def _patched(diff: str) -> str:
    """The source of the strategy after the lines of `diff`, which must be there, have been replaced."""
    before, after = (
        "".join(line[1:] for line in diff.splitlines(keepends=True) if line.startswith(mark)) for mark in "-+"
    )
    source = (EXAMPLE / LAYOUT_FILE).read_text(encoding="utf-8")
    assert source.count(before) == 1
    return source.replace(before, after)


def _without_seconds(lines: list[str]) -> list[str]:
    return [re.sub(r" in [\d.]+s$", " in", line) for line in lines]
