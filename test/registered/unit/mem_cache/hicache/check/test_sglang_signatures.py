"""The stubs in `typings/` against the installed SGLang, and the comparison against stubs that are wrong."""

from __future__ import annotations

import ast
import inspect
import shutil
import tempfile
import unittest
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.check.parameters import call_differences, declared_parameters
from sglang.srt.mem_cache.hicache.check.signatures import check_signatures
from sglang.srt.mem_cache.hicache.releases import declares_something, stub_for
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

STUBS = Path(__file__).resolve().parents[6] / "typings"
RELEASE = version("sglang")


class _Break(NamedTuple):
    """A change that makes a true stub untrue, and the line that must name it."""

    module: str
    old: str
    new: str
    line: str


CONTROLLER = "sglang.srt.managers.cache_controller"
RADIX = "sglang.srt.mem_cache.radix_cache"
PREFIX = "sglang.srt.mem_cache.base_prefix_cache"
ALLOCATOR = "sglang.srt.mem_cache.allocator.base"
CONTEXT = "sglang.srt.runtime_context"
EVENTS = "sglang.srt.disaggregation.kv_events"
UTILS = "sglang.srt.mem_cache.utils"

BREAKS = (
    # Names.
    _Break(CONTROLLER, "class HiCacheAck(", "class HiCacheNod(", "HiCacheNod: is not there"),
    _Break(UTILS, "def split_node_hash_value", "def split_node_hash", "split_node_hash: is not there"),
    _Break(RADIX, "def page_aligned", "def aligned", "RadixKey.aligned: is not there"),
    _Break(RADIX, "    lock_ref: int", "    locks: int", "TreeNode.locks: is no attribute of the class or its bases"),
    _Break(
        RADIX,
        "    lock_ref: int",
        "    lock_ref: ClassVar[int]",
        "TreeNode.lock_ref: is no class attribute of the class or its bases",
    ),
    # Parameters.
    _Break(
        CONTROLLER,
        "def wait_until(self, threshold",
        "def wait_until(self, layer",
        "LayerDoneCounter.wait_until: has no parameter 'layer': (self, threshold)",
    ),
    _Break(
        CONTROLLER,
        "priority: int | None = None, node_id: int = -1\n    ) -> torch.Tensor | None: ...\n    def start",
        "node_id: int = -1, priority: int | None = None\n    ) -> torch.Tensor | None: ...\n    def start",
        "HiCacheController.write: has 'node_id' at position 4, the stub at 3",
    ),
    _Break(
        RADIX,
        "other: RadixKey, offset: int,",
        "other: RadixKey, offset: int = 0,",
        "RadixKey.match_at: requires 'offset', the stub has a default",
    ),
    _Break(
        UTILS,
        "node: TreeNode, page_size: int",
        "node: TreeNode",
        "compute_node_hash_values: requires 'page_size', which the stub lacks",
    ),
    _Break(
        ALLOCATOR,
        "free_index: torch.Tensor, *, start_pos",
        "free_index: torch.Tensor, start_pos",
        "BaseTokenToKVPoolAllocator.free_segment: takes 'start_pos' by name only, the stub by position",
    ),
    _Break(
        CONTEXT,
        "name: str) -> bool",
        "name: str, **others: object) -> bool",
        "RuntimeContext.is_config_namespace_published: takes no **others",
    ),
    # Kinds.
    _Break(
        CONTROLLER,
        "    ack_load_queue: list",
        "    start_loading: list",
        "HiCacheController.start_loading: is a method, the stub says an attribute",
    ),
    _Break(
        CONTEXT,
        "@property\n    def tp_rank",
        "def tp_rank",
        "ParallelContext.tp_rank: is a property, the stub says a method",
    ),
    _Break(
        CONTROLLER,
        "def update_producer",
        "@property\n    def update_producer",
        "LayerDoneCounter.update_producer: is a method, the stub says a property",
    ),
    _Break(RADIX, "class RadixKey:", "class logger:", "logger: is a Logger, the stub says a class"),
    _Break(RADIX, "class RadixKey:", "class RadixKey(TreeNode):", "RadixKey: is not derived from TreeNode"),
    # Values and fields.
    _Break(EVENTS, '"CPU_PINNED"', '"CPU"', "StorageMedium.CPU: is 'CPU_PINNED', the stub says 'CPU'"),
    _Break(
        PREFIX,
        "    prefix_len: int\n",
        "    prefix_len: int = 0\n",
        "InsertResult: requires 'prefix_len', the stub has a default",
    ),
    _Break(
        CONTROLLER,
        "    num_tokens: int = 0\n    timing_enabled: bool = False\n",
        "    timing_enabled: bool = False\n    num_tokens: int = 0\n",
        "HiCacheAck: has 'timing_enabled' at position 5, the stub at 4",
    ),
    # What cannot be compared is said, not skipped.
    _Break(UTILS, "def compute", "if True: ...\ndef compute", "line 6 of the stub is nothing that can be compared"),
)


class TestStubsDescribeTheInstalledSGLang(CustomTestCase):
    def test_every_declared_name_and_signature_is_the_installed_release_s(self) -> None:
        report = check_signatures(STUBS, release=RELEASE)
        assert [str(mismatch) for mismatch in report.mismatches] == []
        stubs = [stub_for(ast.parse(file.read_text()), RELEASE) for file in (STUBS / "sglang").rglob("*.pyi")]
        assert report.modules == len([stub for stub in stubs if declares_something(stub.body)])
        assert report.symbols >= sum(ast.unparse(stub).count("def ") for stub in stubs)

    def test_each_way_to_break_a_stub_is_named_in_one_line(self) -> None:
        for broken in BREAKS:
            with self.subTest(broken.line), tempfile.TemporaryDirectory() as folder:
                stubs = Path(folder)
                stub = _copy_of_stub(broken.module, stubs)
                text = stub.read_text()
                assert broken.old in text
                stub.write_text(text.replace(broken.old, broken.new, 1))
                lines = [str(mismatch) for mismatch in check_signatures(stubs, release=RELEASE).mismatches]
                assert f"{broken.module}: {broken.line}" in lines
                assert not any("\n" in line for line in lines)

    def test_a_module_that_is_gone_is_named_with_the_reason(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            stub = Path(folder) / "sglang" / "srt" / "no_such_module.pyi"
            stub.parent.mkdir(parents=True)
            stub.write_text("class Anything: ...\n")
            (mismatch,) = check_signatures(Path(folder), release=RELEASE).mismatches
            assert str(mismatch) == (
                "sglang.srt.no_such_module: cannot be imported: "
                "ModuleNotFoundError: No module named 'sglang.srt.no_such_module'"
            )

    def test_only_the_package_asked_for_is_compared(self) -> None:
        report = check_signatures(STUBS, release=RELEASE, package="sglang.srt.mem_cache.pool_host")
        assert report.modules == len(list((STUBS / "sglang/srt/mem_cache/pool_host").glob("*.pyi")))
        assert check_signatures(STUBS, release=RELEASE, package=UTILS).modules == 1

    def test_of_a_condition_on_the_release_the_right_branch_counts(self) -> None:
        stub = "if SINCE_0_5_23:\n    def split_node_hash_value() -> None: ...\nelse:\n    def gone() -> None: ...\n"
        with tempfile.TemporaryDirectory() as folder:
            file = (Path(folder) / Path(*UTILS.split("."))).with_suffix(".pyi")
            file.parent.mkdir(parents=True)
            file.write_text(stub)
            for release, symbol in (("0.5.22", "gone"), ("0.5.23.post1", "split_node_hash_value")):
                differences = check_signatures(Path(folder), release=release).mismatches
                assert {mismatch.symbol for mismatch in differences} == {symbol}
            file.write_text(f"if not SINCE_0_5_23:\n    {stub.splitlines()[1].strip()}\n")
            assert check_signatures(Path(folder), release="0.5.23").modules == 0

    def test_a_folder_without_stubs_is_refused_instead_of_passing(self) -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            pytest.raises(LayoutConfigError, match=r"must hold stubs \(\.pyi\) of sglang, got "),
        ):
            check_signatures(Path(folder), release=RELEASE)


def _copy_of_stub(module: str, folder: Path) -> Path:
    """The one stub of `module`, copied to where it belongs below `folder`."""
    place = Path(*module.split(".")).with_suffix(".pyi")
    (folder / place).parent.mkdir(parents=True)
    return Path(shutil.copy(STUBS / place, folder / place))


def _plain(a: int, b: int = 1, c: int = 2) -> None: ...
def _by_name(a: int, *, b: int) -> None: ...
def _by_place(a: int, /) -> None: ...
def _anything(*args: int, **kwargs: int) -> None: ...


class TestWhichCallsAFunctionTakes(CustomTestCase):
    def test_a_stub_may_leave_out_options_and_demand_more(self) -> None:
        for function, stub in (
            (_plain, "a"),
            (_plain, "a, b=..., c=..."),
            (_plain, "a, b"),
            (_plain, "a, *, c=..."),
            (_plain, "x, /"),
            (_plain, "*, c, a"),
            (_by_name, "a, *, b"),
            (_by_place, "a, /"),
            (_anything, "*args, **kwargs"),
        ):
            with self.subTest(stub):
                assert _differences(function, stub) == []

    def test_a_stub_may_not_allow_a_call_that_fails(self) -> None:
        for function, stub, difference in (
            (_plain, "a, c=...", "has 'c' at position 3, the stub at 2"),
            (_plain, "a, d=...", "has no parameter 'd': (a, b, c)"),
            (_plain, "a=...", "requires 'a', the stub has a default"),
            (_plain, "*, b", "requires 'a', which the stub lacks"),
            (_plain, "a, b, c, *args", "takes no *args"),
            (_by_name, "a, b", "takes 'b' by name only, the stub by position"),
            (_by_name, "a", "requires 'b', which the stub lacks"),
            (_by_place, "*, a", "does not take 'a' by name, the stub does"),
            (_by_place, "x, y, /", "takes 1 parameters by position, the stub 2"),
        ):
            with self.subTest(stub):
                assert difference in _differences(function, stub)


def _differences(function: Callable[..., None], stub: str) -> list[str]:
    definition = ast.parse(f"def f({stub}): ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    actual = list(inspect.signature(function).parameters.values())
    return list(call_differences(declared_parameters(definition.args), actual))


if __name__ == "__main__":
    unittest.main()
