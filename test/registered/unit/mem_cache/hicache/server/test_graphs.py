"""CUDA graphs in SGLang's own settings: what counts as asked for, and that switching off is what SGLang then reads."""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.cuda_graph_hook import parse_cuda_graph_config
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.server.graphs import phases_asked_for, phases_with_graphs, turn_graphs_off

if TYPE_CHECKING:
    from collections.abc import Callable

register_cpu_ci(est_time=15, suite="base-a-test-cpu")


def parsed(**fields: object) -> ServerArgs:
    """Settings as far as SGLang resolves those of graphs."""
    make: Callable[..., ServerArgs] = ServerArgs
    server_args = make(model_path="none", **fields)
    parse_cuda_graph_config(server_args)
    return server_args


class TestGraphs(CustomTestCase):
    def test_graphs_are_on_by_default_and_nobody_asked_for_them(self) -> None:
        self.assertIn("decode", phases_with_graphs(parsed()))
        self.assertEqual(phases_asked_for(parsed()), frozenset())

    def test_a_backend_by_name_is_asked_for_and_an_off_switch_is_not(self) -> None:
        cases: list[tuple[dict[str, Any], set[str]]] = [
            ({"cuda_graph_backend_decode": "full"}, {"decode"}),
            ({"cuda_graph_config": {"prefill": {"backend": "breakable"}}}, {"prefill"}),
            ({"cuda_graph_backend_decode": "disabled"}, set()),
            ({"disable_cuda_graph": True}, set()),
            ({"cuda_graph_max_bs_decode": 8}, set()),
        ]
        for fields, asked in cases:
            with self.subTest(fields):
                self.assertEqual(phases_asked_for(parsed(**fields)), asked)

    def test_switched_off_no_phase_is_captured_in_what_the_scheduler_reads(self) -> None:
        server_args = parsed(cuda_graph_max_bs_decode=8)
        turn_graphs_off(server_args)
        self.assertEqual(phases_with_graphs(server_args), frozenset())
        self.assertEqual(resolving_view(server_args).cuda_graph_config.decode.max_bs, 8)  # the rest stays


if __name__ == "__main__":
    unittest.main()
