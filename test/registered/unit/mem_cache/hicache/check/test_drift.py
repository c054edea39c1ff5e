"""What `make drift` relies on and what it sees: the record of the installed release, and changes made to a source."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import drift
import relied_on
from relied_on import ABSENT, FLAGS, HOOKS, METHODS, NODES, TAGS, TREE, Facts, Source
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

import sglang

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

CLASSES = ("sglang.srt.tree.Radix",)
TARGETS = ("sglang.srt.tree.Radix.evict", "sglang.srt.tree.Radix.insert", "sglang.srt.tree.plain")
FILES = {
    "server_args.py": "class ServerArgs:\n    pass\n",
    "arg_groups/fields/memory.py": "class Memory:\n    _NS = 'memory'\n    ratio: float = 2.0\n",
    "distributed/communication_tags.py": "class P2PTag:\n    DEFAULT = 0\n",
    "scheduler.py": "def run(self):\n    self.tree_cache.evict(1)\n    getattr(self.tree_cache, 'lock')\n",
    "base.py": "class Base:\n    def evict(self, count): return count\n",
    "tree.py": (
        "from sglang.srt.base import Base\n"
        "class Radix(Base):\n"
        "    def insert(self, key, value=None):\n        '''Says what it does.'''\n        return self.root_node\n"
        "    def size(self): return 1\n"
        "def plain(batch): pass\n"
    ),
}


def _facts(changes: dict[str, tuple[str, str]]) -> Facts:
    """The facts of a small source, with `old` replaced by `new` in some files."""
    with tempfile.TemporaryDirectory() as name:
        for file, text in FILES.items():
            old, new = changes.get(file, ("", ""))
            assert old in text
            path = Path(name, "sglang/srt", file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(old, new) if old else text)
        return relied_on.facts_of(Source(Path(name)), classes=CLASSES, hooks=TARGETS)


class TestTheRecord(CustomTestCase):
    def test_it_is_what_the_installed_release_has(self) -> None:
        facts = drift.collect(Path(sglang.__path__[0]).parent)
        self.assertEqual(facts, relied_on.read_record(version("sglang")))
        self.assertNotIn(ABSENT, {*facts[HOOKS].values(), *facts[METHODS].values()})

    def test_what_ours_replace_is_known(self) -> None:
        replaced = drift.overridden(Source(Path(sglang.__path__[0]).parent))
        self.assertIn("RadixCache.insert", replaced)
        self.assertIn("BasePrefixCache.match_prefix", replaced)
        self.assertNotIn("RadixCache.pretty_print", replaced)


class TestWhatDrifts(CustomTestCase):
    before: ClassVar[Facts]

    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.before = _facts({})

    def _drifted(
        self, file: str, old: str, new: str, *, replaced: frozenset[str] = frozenset()
    ) -> list[tuple[str, str, str]]:
        found = drift.differences(self.before, _facts({file: (old, new)}), replaced)
        return [
            (section, kind, name)
            for section, each in found.items()
            for kind in each._fields
            for name in getattr(each, kind)
        ]

    def test_the_facts_of_a_source(self) -> None:
        self.assertEqual(list(self.before[TREE]), ["evict", "lock"])
        self.assertEqual(list(self.before[METHODS]), ["Base", "Base.evict", "Radix", "Radix.insert", "Radix.size"])
        self.assertEqual([name for name, fact in self.before[METHODS].items() if NODES in fact], ["Radix.insert"])
        self.assertEqual((list(self.before[FLAGS]), list(self.before[TAGS])), (["ratio"], ["DEFAULT"]))
        self.assertEqual(list(self.before[HOOKS].values()), ["self, count", "self, key, value", "batch"])

    def test_each_kind_of_change_is_seen(self) -> None:
        for file, old, new, expected in (
            ("scheduler.py", "cache.evict", "cache.touch", [(TREE, "new", "touch"), (TREE, "gone", "evict")]),
            ("base.py", "return count", "return 0", [(METHODS, "changed", "Base.evict")]),
            ("tree.py", "size", "width", [(METHODS, "new", "Radix.width"), (METHODS, "gone", "Radix.size")]),
            (
                "tree.py",
                "Radix(Base)",
                "Radix(Base, Other)",
                [(METHODS, "new", "Other"), (METHODS, "changed", "Radix")],
            ),
            ("arg_groups/fields/memory.py", "ratio", "share", [(FLAGS, "new", "share"), (FLAGS, "gone", "ratio")]),
            ("distributed/communication_tags.py", "= 0", "= 0\n    SYNC = 1", [(TAGS, "new", "SYNC")]),
            ("tree.py", "plain(batch)", "plain(batch, step)", [(HOOKS, "changed", TARGETS[2])]),
            ("tree.py", "def plain", "def other", [(HOOKS, "changed", TARGETS[2])]),
        ):
            with self.subTest(new):
                self.assertEqual(self._drifted(file, old, new), expected)

    def test_words_and_what_ours_replace_do_not_count(self) -> None:
        self.assertEqual(self._drifted("tree.py", "Says", "Tells"), [])
        self.assertEqual(self._drifted("tree.py", "self.root_node", "None", replaced=frozenset({"Radix.insert"})), [])
