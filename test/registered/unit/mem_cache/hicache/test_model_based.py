"""Random calls on one to four ranks, compared after every step with sets of prefixes (`support.model`).

The same sequences each time, and as many as fit a minute. For more, and for a failure made small::

    KVLAYOUTS_MODEL_EXAMPLES=2000 pytest test/registered/unit/mem_cache/hicache/test_model_based.py --timeout 7200
"""

from __future__ import annotations

import os
import unittest

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from sglang.test.ci.ci_register import register_cpu_ci

from support.caches import CacheTestCase
from support.faults import LAYOUTS
from support.model.machine import CacheMachine
from support.model.sets import Model, prefixes

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

_EXAMPLES = os.environ.get("KVLAYOUTS_MODEL_EXAMPLES")
_STEPS = 40
_EVERY_RUN = settings(
    max_examples=180,
    stateful_step_count=_STEPS,
    derandomize=True,
    database=None,
    deadline=None,
    # A failure is printed as it was found: making it small takes minutes, and the sequence comes again in any case.
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
_LONG_RUN = settings(
    max_examples=int(_EXAMPLES or 1),
    stateful_step_count=2 * _STEPS,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class TestModelBased(CacheTestCase):
    def test_any_sequence_of_calls_leaves_all_ranks_as_the_model_says(self) -> None:
        for layout in LAYOUTS:
            with self.subTest(layout=layout):
                machine = type(f"{layout.title()}Machine", (CacheMachine,), {"layout": layout})
                run_state_machine_as_test(machine, settings=_LONG_RUN if _EXAMPLES else _EVERY_RUN)


class TestTheModelItself(unittest.TestCase):
    def test_it_refuses_what_a_cache_must_not_do(self) -> None:
        page, child = (None, 1), (None, 1, 2)
        model = Model(ranks=2, capacity=8, policy="write_through", threshold=1, device=frozenset([page, child]))
        self.assertEqual((model.match((None, 1, 2, 3)), model.match((None, 2)), model.free), ((2, 0), (0, 0), 6))
        with self.assertRaisesRegex(AssertionError, "brought"):
            model.evicted(frozenset([page, child, (None, 9)]), frozenset())
        model.locks.append(child)
        self.assertEqual(model.protected, frozenset(prefixes(child)))
        with self.assertRaisesRegex(AssertionError, "locked pages were evicted"):
            model.evicted(frozenset([page]), frozenset())
        model.device = frozenset([child])
        with self.assertRaisesRegex(AssertionError, "lacks its prefix"):
            model.check()


if __name__ == "__main__":
    unittest.main()
