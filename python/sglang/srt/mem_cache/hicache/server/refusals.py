"""Which of SGLang's settings go together with a layout strategy: one table, read by the server, tests and docs.

A row says when it applies, what the answer is, and what the user can do. The table is walked in the parent process,
after SGLang has resolved its own settings and before anything is spawned. Add a row, and the documentation and the
test of all combinations have it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sglang.srt.mem_cache.layouts.capabilities import stripes_pages
from sglang.srt.mem_cache.layouts.errors import LayoutConfigError
from sglang.srt.mem_cache.layouts.facts import needs_peers, shares_pages_out

from .choice import STRATEGY_FLAG
from .facts import SettingUnknownError
from .rule import Answer, Rule, Scope
from .rules_any import RULES_FOR_ANY
from .rules_shared import RULES_FOR_SHARED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from sglang.srt.mem_cache.layouts.protocol import AnyKVLayoutStrategy

    from .facts import ServerFacts

RULES: Final[tuple[Rule, ...]] = (*RULES_FOR_ANY, *RULES_FOR_SHARED)


def scopes_of(layout: AnyKVLayoutStrategy) -> frozenset[Scope]:
    """The rows that concern a strategy, by what it says of itself."""
    said = {Scope.ANY: True, Scope.PEERS: needs_peers(layout), Scope.SHARDED: shares_pages_out(layout)}
    return frozenset(scope for scope, holds in said.items() if holds)


def refuse_stripes(layout: AnyKVLayoutStrategy, asked: str) -> None:
    """Raise `LayoutConfigError` for striped pages: their pools come with ``--dcp-size``, which is refused."""
    if stripes_pages(layout):
        raise LayoutConfigError(
            f"{asked} stripes pages as SGLang does with --dcp-size, which is not served yet; accepted in a server: "
            f"strategies of whole pages, such as {STRATEGY_FLAG} host_shared"
        )


def applying(facts: ServerFacts, scopes: Collection[Scope]) -> Iterator[Rule]:
    """The rows that apply to a server whose strategy they concern: those of `scopes`."""
    for rule in RULES:
        if rule.scope in scopes and _applies(rule, facts):
            yield rule


def _applies(rule: Rule, facts: ServerFacts) -> bool:
    try:
        return rule.applies(facts)
    except SettingUnknownError:
        return False


def refuse_what_does_not_fit(facts: ServerFacts, asked: str, scopes: Collection[Scope]) -> list[str]:
    """Raise `LayoutConfigError` for the first refusal; return the warnings. Nothing has been started yet."""
    rules = list(applying(facts, scopes))
    for rule in rules:
        if rule.answer is Answer.REFUSED:
            raise LayoutConfigError(rule.message(asked))
    return [rule.message(asked) for rule in rules]


def rules_as_markdown() -> str:
    """The table as the documentation shows it, a list for each answer and scope. What to do instead a refusal says."""
    lists = []
    for answer in Answer:
        for scope in Scope:
            rows = [rule for rule in RULES if rule.answer is answer and rule.scope is scope]
            if rows:
                lines = [f"- {rule.setting}: {_reason(rule)}\n" for rule in rows]
                lists.append(f"{answer.value.capitalize()} ({scope.value}):\n\n{''.join(lines)}")
    return "\n".join(lists)


def _reason(rule: Rule) -> str:
    return rule.why if rule.answer is Answer.REFUSED else f"{rule.why}; {rule.remedy}"
