from __future__ import annotations

import unittest

import pytest
from sglang.srt.runtime_context import get_context, get_memory, get_parallel, publish
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.layouts import LayoutConfigError

register_cpu_ci(est_time=20, suite="base-a-test-cpu")


class TestStandaloneRuntime(CustomTestCase):
    def test_settings_and_rank_are_published_for_the_duration_only(self) -> None:
        with standalone_runtime(rank=2, world_size=4, page_size=64, hicache_mem_layout="page_first_direct"):
            assert get_memory().hicache_mem_layout == "page_first_direct"
            assert get_memory().hicache_io_backend == "direct"
            parallel = get_parallel()
            assert (parallel.tp_rank, parallel.tp_size, parallel.attn_tp_rank) == (2, 4, 2)
            assert (parallel.pp_rank, parallel.pp_size, parallel.attn_dcp_size) == (0, 1, 1)
        assert not get_context().is_config_namespace_published("memory")

    def test_an_inner_scope_gives_back_the_outer_settings_after_an_error(self) -> None:
        with standalone_runtime(hicache_ratio=3.0):
            with pytest.raises(LayoutConfigError), standalone_runtime(rank=1, world_size=2, hicache_ratio=5.0):
                _fail_with_ratio(get_memory().hicache_ratio)
            assert get_memory().hicache_ratio == 3.0
            assert get_parallel().tp_rank == 0

    def test_a_rank_outside_the_group_and_an_unknown_field_are_refused(self) -> None:
        with (
            pytest.raises(LayoutConfigError, match=r"rank must be in \[0, 1\], got 2"),
            standalone_runtime(rank=2, world_size=2),
        ):
            pass
        with pytest.raises(ValueError, match="no_such_field"), standalone_runtime(no_such_field=1):
            pass
        assert not get_context().is_config_namespace_published("memory")

    def test_a_process_of_a_server_is_left_alone(self) -> None:
        with standalone_runtime() as server_args:
            publish(server_args, role="scheduler")
            with pytest.raises(RuntimeError, match="serves as SGLang's scheduler"), standalone_runtime():
                pass


def _fail_with_ratio(ratio: float) -> None:
    assert ratio == 5.0
    raise LayoutConfigError


if __name__ == "__main__":
    unittest.main()
