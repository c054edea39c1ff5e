"""The operators' page and the dashboard say what the code does: refusals, metrics, the start-up line."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang.test.ci.ci_register import register_cpu_ci

from sglang.srt.mem_cache.hicache.server.metrics import COUNTERS, GAUGES, PREFIX, metrics_as_markdown
from sglang.srt.mem_cache.hicache.server.refusals import rules_as_markdown
from sglang.srt.mem_cache.layouts.registry import BUILT_IN
from support.caches import CacheSpec, CacheTestCase, chain
from support.reporting import ReportingGroup
from support.scrape import Scrape, legends, metrics_of

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

# The first two are of SGLang's scheduler (test_http_server.py); a CPU's events know no time (test_sglang_metrics.py).
ELSEWHERE = {
    "sglang:hicache_host_used_tokens",
    "sglang:hicache_host_total_tokens",
    "sglang:hicache_backup_duration_seconds",
    "sglang:load_back_duration_seconds",
}
DOCS = Path(__file__).parents[4] / "docs"


class TestOperatorsPage(CacheTestCase):
    maxDiff = None

    def test_its_tables_are_those_of_the_code(self) -> None:
        page = (DOCS / "operators.md").read_text(encoding="utf-8")
        for name, table in (("rules", rules_as_markdown()), ("metrics", metrics_as_markdown())):
            shown = re.search(rf"<!-- {name} -->\n(.*)<!-- end of {name} -->", page, re.DOTALL)
            assert shown is not None, f"docs/operators.md lacks the marks of {name}"
            self.assertEqual(shown[1], table)

    def test_the_dashboard_asks_for_all_metrics_of_ours(self) -> None:
        ours = {PREFIX + name for name in GAUGES} | {f"{PREFIX}{name}_total" for name in COUNTERS}
        self.assertEqual({name for name in metrics_of(_dashboard()) if name.startswith(PREFIX)}, ours)

    def test_the_page_and_the_dashboard_name_series_that_a_scrape_has(self) -> None:
        for layout in BUILT_IN:
            scrape = self._scrape(layout)
            lines = legends(_dashboard(), scrape)
            for title, shown in lines.items():
                self.assertEqual(len(shown), len(set(shown)), f"two lines of {title!r} have the same legend: {shown}")
            self.assertEqual(lines["Host bytes in use by rank"], ["TP0 PP0", "TP1 PP0"])
            page = (DOCS / "operators.md").read_text(encoding="utf-8")
            for name in re.findall(r"`(sglang:\w+)`", page):
                if name not in ELSEWHERE:
                    self.assertTrue(scrape.series[name] or scrape.series[f"{name}_count"], name)

    def _scrape(self, layout: str) -> Scrape:
        """Two ranks of which one chain was copied, evicted and loaded, and another was lost under write_back."""
        asked = CacheSpec(layout=layout, ranks=2, policy="write_back")
        spec = replace(asked, device_pages=24 // asked.lanes, host_pages=12 // asked.host_lanes)
        group = ReportingGroup(spec, Path(self.enterContext(tempfile.TemporaryDirectory())))
        for pages in (range(6), range(6), range(20, 34)):
            group.serve(chain(spec, *pages))
            group.evict_all()
        return group.scrape()


def _dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return found
