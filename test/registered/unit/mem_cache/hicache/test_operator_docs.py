"""The operators' page and the dashboard say what the code does: refusals, metrics, the start-up line."""

from __future__ import annotations

import json
import re
from pathlib import Path

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.server.metrics import COUNTERS, GAUGES, PREFIX, metrics_as_markdown
from sglang.srt.mem_cache.hicache.server.refusals import rules_as_markdown

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

DOCS = Path(__file__).parents[5] / "docs"


class TestOperatorsPage(CustomTestCase):
    maxDiff = None

    def test_its_tables_are_those_of_the_code(self) -> None:
        page = (DOCS / "operators.md").read_text(encoding="utf-8")
        for name, table in (("rules", rules_as_markdown()), ("metrics", metrics_as_markdown())):
            shown = re.search(rf"<!-- {name} -->\n(.*)<!-- end of {name} -->", page, re.DOTALL)
            assert shown is not None, f"docs/operators.md lacks the marks of {name}"
            self.assertEqual(shown[1], table)

    def test_the_dashboard_asks_for_metrics_that_exist(self) -> None:
        dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text(encoding="utf-8"))
        asked = {
            name
            for panel in dashboard["panels"]
            for target in panel["targets"]
            for name in re.findall(rf"{PREFIX}\w+", target["expr"])
        }
        ours = {PREFIX + name for name in GAUGES} | {f"{PREFIX}{name}_total" for name in COUNTERS}
        self.assertEqual(asked, ours)
