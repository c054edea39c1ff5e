"""Configuration and the registry, with real distributions on the path."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import sys
from typing import TYPE_CHECKING

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.layouts import (
    CpSharedLayout,
    IdentityLayout,
    LayoutConfig,
    LayoutConfigError,
    create_layout,
    known_layouts,
)
from sglang.srt.mem_cache.layouts.registry import BUILT_IN, ENTRY_POINT_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

STRATEGY = """
from sglang.srt.mem_cache.layouts import IdentityLayout

class Layout(IdentityLayout):
    name = "{module}"

def make(config):
    assert config.options == {{"width": 3}} or not config.options
    return Layout(page_size=config.page_size)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, str]], None]:
    """Install a distribution: a module and the metadata that pip would write, in a directory on `sys.path`."""

    def install_distribution(name: str, entries: dict[str, str]) -> None:
        site = tmp_path / name
        metadata = site / f"{name}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (site / f"{name}.py").write_text(STRATEGY.format(module=name))
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{entry} = {value}" for entry, value in entries.items()]
        (metadata / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *lines, ""]))
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, name, raising=False)

    return install_distribution


def _make_config(name: str, **changes: object) -> LayoutConfig:
    return dataclasses.replace(LayoutConfig(name=name, page_size=16, shard_size=4, shard_rank=2), **changes)  # type: ignore[arg-type]  # keyword by keyword


def test_the_default_layout_is_identity_with_sglangs_smallest_page() -> None:
    layout = create_layout(LayoutConfig())
    assert isinstance(layout, IdentityLayout)
    assert layout.page_size == 1


def test_built_in_strategies_are_built_from_the_config() -> None:
    identity, shared = create_layout(_make_config("identity")), create_layout(_make_config("cp_shared"))
    assert isinstance(identity, IdentityLayout)
    assert identity.page_size == 16
    assert isinstance(shared, CpSharedLayout)
    assert (shared.page_size, shared.lane_count, shared.lane) == (16, 4, 2)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_strategy_goes_by_the_name_that_selects_it(name: str) -> None:
    assert create_layout(_make_config(name)).name == name


@pytest.mark.parametrize("name", ["cp-shared", "", "Identity"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    message = f"--kv-layout-strategy must be one of {', '.join(known_layouts())}, got {name!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        create_layout(_make_config(name))
    assert {"identity", "cp_shared"} <= set(known_layouts())


def test_a_strategy_of_another_distribution_is_found_listed_and_built(
    install: Callable[[str, dict[str, str]], None],
) -> None:
    install("striped_kv_layout", {"striped": "striped_kv_layout:make"})
    assert known_layouts()[:2] == ("identity", "cp_shared")
    assert "striped" in known_layouts()
    layout = create_layout(_make_config("striped", options={"width": 3}))
    assert layout.name == "striped_kv_layout"
    assert layout.page_size == 16
    with pytest.raises(LayoutConfigError, match=r"identity, cp_shared, .*striped"):
        create_layout(_make_config("stripes"))


def test_a_strategy_is_imported_only_when_selected(install: Callable[[str, dict[str, str]], None]) -> None:
    install("lazy_kv_layout", {"lazy": "lazy_kv_layout:make"})
    known_layouts()
    create_layout(_make_config("identity"))
    assert "lazy_kv_layout" not in sys.modules
    create_layout(_make_config("lazy"))
    assert "lazy_kv_layout" in sys.modules


def test_a_name_that_two_distributions_offer_is_refused_naming_both(
    install: Callable[[str, dict[str, str]], None],
) -> None:
    install("one_kv_layout", {"twice": "one_kv_layout:make"})
    install("other_kv_layout", {"twice": "other_kv_layout:make"})
    assert known_layouts().count("twice") == 1
    message = (
        "--kv-layout-strategy 'twice' is offered twice: one_kv_layout (one_kv_layout:make) and "
        "other_kv_layout (other_kv_layout:make); uninstall one"
    )
    with pytest.raises(LayoutConfigError, match=f"^{re.escape(message)}$"):
        create_layout(_make_config("twice"))


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("no_such_kv_layout:make", "ModuleNotFoundError: No module named 'no_such_kv_layout'"),
        ("broken_kv_layout:mak", "AttributeError: module 'broken_kv_layout' has no attribute 'mak'"),
    ],
)
def test_an_entry_point_that_leads_nowhere_is_refused_naming_its_distribution(
    install: Callable[[str, dict[str, str]], None], value: str, error: str
) -> None:
    install("broken_kv_layout", {"broken": value})
    message = (
        f"--kv-layout-strategy 'broken' cannot be loaded from broken_kv_layout ({value}): {error}; "
        "mend its entry point or uninstall it"
    )
    with pytest.raises(LayoutConfigError, match=f"^{re.escape(message)}$"):
        create_layout(_make_config("broken"))


def test_an_entry_point_whose_code_is_broken_is_refused_in_one_line(
    install: Callable[[str, dict[str, str]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torn_kv_layout_code.py").write_text("def make(:", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    install("torn_kv_layout", {"torn": "torn_kv_layout_code:make", "raises": "json:loads"})
    with pytest.raises(LayoutConfigError, match=r"^--kv-layout-strategy 'torn' cannot be loaded .*: SyntaxError: .*"):
        create_layout(_make_config("torn"))
    with pytest.raises(LayoutConfigError, match=r"^--kv-layout-strategy 'raises' cannot be made by .*: TypeError: .*"):
        create_layout(_make_config("raises"))


def test_a_built_in_name_cannot_be_taken_over(install: Callable[[str, dict[str, str]], None]) -> None:
    install("taker_kv_layout", {"identity": "taker_kv_layout:make", "cp_shared": "taker_kv_layout:make"})
    assert type(create_layout(_make_config("identity"))) is IdentityLayout
    assert type(create_layout(_make_config("cp_shared"))) is CpSharedLayout
    assert len(set(known_layouts())) == len(known_layouts())


def test_the_table_of_built_in_strategies_is_read_only() -> None:
    with pytest.raises(TypeError):
        BUILT_IN["mine"] = BUILT_IN["identity"]  # type: ignore[index]  # what the test is about


@pytest.mark.parametrize("name", BUILT_IN)
def test_settings_that_a_strategy_does_not_have_are_refused(name: str) -> None:
    message = f"--kv-layout-config: layout {name!r} has no setting 'lanes'; accepted: none"
    with pytest.raises(LayoutConfigError, match=f"^{re.escape(message)}$"):
        create_layout(_make_config(name, options={"lanes": 4, "width": 1}))


def test_settings_that_a_strategy_has_are_named_when_another_is_refused() -> None:
    config = _make_config("mine", options={"width": 3, "depth": 1})
    config.refuse_unknown_options("width", "depth")
    with pytest.raises(LayoutConfigError, match="'mine' has no setting 'depth'; accepted: width, height"):
        config.refuse_unknown_options("width", "height")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, "page_size must be >= 1, got 0"),
        ({"shard_size": 0, "shard_rank": 0}, "shard_size must be in [1, 32767], got 0"),
        ({"shard_size": 32_768}, "shard_size must be in [1, 32767], got 32768"),
        ({"shard_rank": 4}, "shard_rank must be in [0, 3], got 4"),
        ({"shard_rank": -1}, "shard_rank must be in [0, 3], got -1"),
    ],
)
def test_an_impossible_config_names_the_field_the_value_and_the_range(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        _make_config("cp_shared", **changes)


def test_a_config_travels_to_spawned_processes() -> None:
    for config in (LayoutConfig(), _make_config("cp_shared", options={"width": 3})):
        assert pickle.loads(pickle.dumps(config)) == config
        assert copy.deepcopy(config) == config


def test_a_config_is_frozen_and_not_changed_through_the_options_that_it_was_given() -> None:
    options = {"width": 3}
    config = _make_config("mine", options=options)
    options["width"] = 4
    assert config.options == {"width": 3}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 64  # type: ignore[misc]  # what the test is about
