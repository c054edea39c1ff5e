"""What a scrape of ``/metrics`` says, and what a Grafana board makes of it."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Series = tuple[dict[str, str], float]

# The two forms of query that the board has: a metric, or a function of its last minutes.
_QUERY = re.compile(r"(?P<metric>[\w:]+)|(?P<function>\w+)\((?P<inner>[\w:]+)\[\d+m\]\)")


class Scrape:
    """Series by the name that a query uses, each with its labels and its value."""

    def __init__(self, text: str) -> None:
        self.series: dict[str, list[Series]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.series[sample.name].append((dict(sample.labels), sample.value))

    def total(self, name: str) -> float:
        """The sum over all series of one name, as ``sum(name)`` in a query."""
        return sum(value for _, value in self.series[name])

    def by_rank(self, name: str) -> dict[str, float]:
        """The values of one name by `tp_rank`."""
        return {labels["tp_rank"]: value for labels, value in self.series[name]}


def metrics_of(board: dict[str, Any]) -> set[str]:
    """Names of the metrics that a board asks for. `AssertionError` for a query that `legends` cannot follow."""
    return {_parts(target["expr"])[0] for panel in board["panels"] for target in panel["targets"]}


def legends(board: dict[str, Any], scrape: Scrape) -> dict[str, list[str]]:
    """The legend of each line, by the title of its panel.

    `AssertionError` for a metric that the scrape lacks, or a label in a legend that a series of it lacks.
    """
    return {
        panel["title"]: [line for target in panel["targets"] for line in _lines(target, scrape)]
        for panel in board["panels"]
    }


def _lines(target: dict[str, str], scrape: Scrape) -> list[str]:
    metric, keeps_name = _parts(target["expr"])
    found = scrape.series.get(metric, [])
    assert found, f"nothing in the scrape is called {metric}"
    return [
        _render(target["legendFormat"], {**labels, **({"__name__": metric} if keeps_name else {})}, metric)
        for labels, _ in found
    ]


def _render(legend: str, labels: dict[str, str], metric: str) -> str:
    asked = set(re.findall(r"{{\s*(\w+)\s*}}", legend))
    assert asked <= set(labels), f"{legend!r} asks for {asked - set(labels)}, which {metric} lacks: {labels}"
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels[found[1]], legend)


def _parts(query: str) -> tuple[str, bool]:
    """The metric of a query, and whether the result keeps its name."""
    found = _QUERY.fullmatch(query)
    assert found is not None, f"a query in a form that is not known here: {query}"
    return (found["metric"], True) if found["metric"] else (found["inner"], False)
