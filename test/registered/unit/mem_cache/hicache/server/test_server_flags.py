"""Our flags in SGLang's own parser, config file and records, and every refusal before anything is spawned."""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest import mock

from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from sglang.srt.mem_cache.hicache.seam import installed
from sglang.srt.mem_cache.hicache.server import args as server_args
from sglang.srt.mem_cache.hicache.server import hook_table, hooks, refusals
from sglang.srt.mem_cache.hicache.server.choice import LayoutChoice, choice_of, choose
from sglang.srt.mem_cache.hicache.server.facts import ServerFacts
from sglang.srt.mem_cache.hicache.server.help import show_flags_in_help
from sglang.srt.mem_cache.hicache.server.refusals import RULES, applying
from sglang.srt.mem_cache.hicache.server.rule import Answer, Rule, Scope
from sglang.srt.mem_cache.layouts import LayoutConfigError
from support.replays import FAULTY_LAYOUTS
from support.server_cases import CASES, GOOD, MLA, is_known, make_facts, sglang_args

register_cpu_ci(est_time=60, suite="base-a-test-cpu")


SCOPES = ({Scope.ANY}, {Scope.ANY, Scope.PEERS}, set(Scope))
"""Those of a strategy that shares nothing out, one that shares the host out, and one that shares both tiers out."""


class FlagsTestCase(CustomTestCase):
    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        load_plugins()


class TestRefusals(FlagsTestCase):
    def test_every_row_of_the_table_has_a_case_and_no_case_is_left_over(self) -> None:
        self.assertEqual(set(CASES), {rule.setting for rule in RULES})
        self.assertEqual(len({rule.setting for rule in RULES}), len(RULES))

    def test_each_row_answers_for_its_server_and_for_no_other(self) -> None:
        for rule in RULES:
            with self.subTest(rule.setting):
                self._check_row(rule)

    def _check_row(self, rule: Rule) -> None:
        if not is_known(CASES[rule.setting][0]):
            self.assertFalse(rule.applies(make_facts({}, {})))
            return
        facts = make_facts(*CASES[rule.setting])
        for scopes in SCOPES:
            self.assertEqual(list(applying(facts, scopes)), [rule] if rule.scope in scopes else [])
        asked = "--kv-layout-strategy cp_shared"
        if rule.answer is Answer.WARNED:
            (warning,) = refusals.refuse_what_does_not_fit(facts, asked, set(Scope))
        else:
            with self.assertRaises(LayoutConfigError) as caught:
                refusals.refuse_what_does_not_fit(facts, asked, set(Scope))
            warning = str(caught.exception)
        for part in (asked, rule.setting, rule.remedy):
            self.assertIn(part, warning)
        self.assertNotIn("\n", warning)

    def test_a_good_server_is_neither_refused_nor_warned_about(self) -> None:
        for scopes in SCOPES:
            self.assertEqual(refusals.refuse_what_does_not_fit(make_facts({}, {}), "x", scopes), [])

    def test_rows_concern_a_strategy_by_what_it_says_of_itself(self) -> None:
        for name, scopes in (("identity", SCOPES[0]), ("host_shared", SCOPES[1]), ("cp_shared", SCOPES[2])):
            layout = LayoutChoice(strategy=name).create(page_size=16, shard_size=2, shard_rank=0)
            self.assertEqual(refusals.scopes_of(layout), scopes)

    def test_a_dsa_model_on_nvidia_gpus_is_served_and_prefill_context_parallelism_is_only_warned_about(self) -> None:
        changes = {"model": replace(MLA, is_dsa=True), "on_cpu": False, "on_nvidia": True}
        self.assertEqual(refusals.refuse_what_does_not_fit(make_facts({}, changes), "x", set(Scope)), [])
        implied = {"attn_cp_size": 2, "enable_dp_attention": True}  # what SGLang makes of --enable-prefill-cp
        (warning,) = refusals.refuse_what_does_not_fit(make_facts(implied, changes), "x", set(Scope))
        self.assertIn("--attention-context-parallel-size", warning)

    def test_an_unsupported_release_is_refused_by_number(self) -> None:
        with (
            mock.patch.object(installed, "version", return_value="0.5.19"),
            self.assertRaisesRegex(LayoutConfigError, r"needs SGLang 0\.5\.20.*, got 0\.5\.19; install"),
        ):
            server_args.refuse_unsupported_release("--kv-layout-strategy identity")
        server_args.refuse_unsupported_release("--kv-layout-strategy identity")

    def test_a_hook_that_did_not_apply_is_refused_by_name(self) -> None:
        hooks.refuse_missing_hooks("--kv-layout-strategy identity")
        hook = hook_table.HOOKS[-1]
        stray = hooks.Hook(target=hook.target, function=lambda: None, kind=hook.kind)
        hooks.expect_hooks((*hook_table.HOOKS[:-1], stray))
        self.addCleanup(hooks.expect_hooks, hook_table.HOOKS)
        with self.assertRaisesRegex(LayoutConfigError, "did not apply our hooks on [^,]*ModelRunner.forward;"):
            hooks.refuse_missing_hooks("--kv-layout-strategy identity")
        hooks.expect_hooks(())
        with self.assertRaisesRegex(LayoutConfigError, "did not apply our hooks on any function;"):
            hooks.refuse_missing_hooks("--kv-layout-strategy identity")


class TestFlags(FlagsTestCase):
    def test_help_shows_the_three_flags(self) -> None:
        parser = argparse.ArgumentParser()
        sglang_args.ServerArgs.add_cli_args(parser)
        for flag in ("--kv-layout-strategy", "--kv-layout-config", "--enable-nsa-prefill-cp-shared-kv"):
            self.assertIn(flag, parser.format_help())

    def test_sglang_serve_shows_them_too_though_it_loads_no_plugin_for_help(self) -> None:
        program = "import sys; sys.argv = ['sglang', 'serve', '--help']; from sglang.cli.main import main; main()"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200)
        for flag in ("--kv-layout-strategy NAME", "--kv-layout-config JSON", "--enable-nsa-prefill-cp-shared-kv"):
            self.assertEqual(done.stdout.count(f"\n  {flag}"), 1, flag)

    def test_only_a_process_that_prints_the_help_of_serve_is_hooked_up_early(self) -> None:
        for arguments, hooked in (
            (["serve", "--help"], True),
            (["serve", "--model-path", "x", "-h"], True),
            (["serve", "--model-path", "x"], False),
            (["version", "--help"], False),
            (["--help"], False),
        ):
            with self.subTest(arguments), mock.patch.object(sys, "meta_path", []), mock.patch.dict(sys.modules):
                del sys.modules["sglang.srt.server_args"]
                show_flags_in_help(["sglang", *arguments])
                self.assertEqual(len(sys.meta_path), int(hooked))

    def test_command_line_and_config_file_make_the_same_choice_and_it_survives_pickling(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "server.yaml")
            file.write_text("enable-nsa-prefill-cp-shared-kv: true\ntp-size: 2\n", encoding="utf-8")
            from_file = self._parse("--config", str(file))
        from_line = self._parse("--enable-nsa-prefill-cp-shared-kv")
        for record in (from_file, from_line, pickle.loads(pickle.dumps(from_line))):
            choice = choice_of(record)
            assert choice is not None
            self.assertEqual((choice.strategy, choice.asked), ("cp_shared", "--enable-nsa-prefill-cp-shared-kv"))
            self.assertEqual(record.radix_cache_backend, "kv_layout")

    def test_without_our_flags_the_record_is_sglangs(self) -> None:
        record = self._parse()
        self.assertIsNone(choice_of(record))
        self.assertIsNone(record.radix_cache_backend)
        self.assertEqual([name for name in vars(record) if "layout" in name], [])

    def test_engine_takes_our_keywords_and_leaves_the_others_to_sglang(self) -> None:
        build = server_args.keyword_factory(sglang_args.ServerArgs)
        record = build(model_path="none", kv_layout_strategy="identity")
        choice = choice_of(record)
        assert choice is not None
        self.assertEqual(choice.strategy, "identity")
        self.assertIsNone(choice_of(build(model_path="none")))
        with self.assertRaises(TypeError):
            build(model_path="none", kv_layout_stratgy="identity")

    def test_flags_that_contradict_each_other_are_refused(self) -> None:
        for strategy, config, cp_shared, message in (
            ("identity", None, True, "implies --kv-layout-strategy cp_shared, got --kv-layout-strategy identity"),
            (None, "{}", False, "--kv-layout-config needs --kv-layout-strategy"),
            ("cp-shared", None, False, "must be one of identity, cp_shared.*got 'cp-shared'"),
            ("identity", "[1]", False, "must be a JSON object"),
            ("identity", "{", False, "must be JSON or @FILE"),
            ("identity", "@/nowhere/x.json", False, "cannot read '/nowhere/x.json': No such file"),
            ("identity", "@/no\0where", False, "cannot read '/no.*where': embedded null byte"),
            ("identity", f"@{sys.executable}", False, "--kv-layout-config: cannot read '.*': is not UTF-8"),
            ("identity", "[" * 100_000, False, r"must be JSON or @FILE with JSON, got '\[{36}\.\.\.: "),
            ("", None, False, "--kv-layout-strategy must be one of identity, cp_shared, .*, got ''"),
            ("", None, True, "implies --kv-layout-strategy cp_shared, got --kv-layout-strategy "),
        ):
            with self.subTest(message), self.assertRaisesRegex(LayoutConfigError, message):
                choose(strategy, config, enable_cp_shared=cp_shared)

    def test_settings_come_as_json_a_file_or_a_mapping(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "layout.json")
            file.write_text(json.dumps({"a": 1}), encoding="utf-8")
            for config in ('{"a": 1}', f"@{file}", {"a": 1}):
                choice = choose("identity", config, enable_cp_shared=False)
                assert choice is not None
                self.assertEqual(choice.options, {"a": 1})

    def test_settings_from_python_that_are_no_mapping_with_names_for_keys_are_refused(self) -> None:
        for config in (5, True, 0, [("a", 1)], ["ab"], b"{}", {1: 2}):
            with self.subTest(config), self.assertRaisesRegex(LayoutConfigError, "must be a JSON object"):
                choose("identity", cast("Any", config), enable_cp_shared=False)

    def test_a_setting_that_the_strategy_does_not_have_is_refused(self) -> None:
        choice = LayoutChoice(strategy="identity", options={"a": 1})
        with self.assertRaisesRegex(LayoutConfigError, "layout 'identity' has no setting 'a'"):
            choice.create(page_size=16, shard_size=1, shard_rank=0)

    def _parse(self, *flags: str) -> Any:  # noqa: ANN401  # ServerArgs
        return sglang_args.prepare_server_args(["--model-path", "none", *flags])


class TestCheckBeforeTheLaunch(FlagsTestCase):
    FACTS: ClassVar[dict[str, Any]] = {"model": MLA, "on_cpu": True}

    def test_it_refuses_and_names_both_settings(self) -> None:
        with self.assertRaisesRegex(LayoutConfigError, "^--kv-layout-strategy cp_shared does not .*--enable-lmcache: "):
            self._check({"enable_lmcache": True})

    def test_a_group_of_one_rank_falls_back_to_identity_with_a_warning(self) -> None:
        with self.assertLogs(server_args.logger, "WARNING") as logs:
            record = self._check({"tp_size": 1}, shard_size=1)
        self.assertIn("the shard group has one rank (--tp-size 1)", logs.output[0])
        choice = choice_of(record)
        assert choice is not None
        self.assertEqual(choice.strategy, "identity")

    def test_a_strategy_that_would_share_nothing_anyway_stays_without_a_word(self) -> None:
        with self.assertNoLogs(server_args.logger, "WARNING"):
            record = self._check({"tp_size": 1}, shard_size=1, strategy="identity")
        choice = choice_of(record)
        assert choice is not None
        self.assertFalse(choice.wants_peers(page_size=16))
        for strategy in ("cp_shared", "host_shared", "dcp_striped"):
            self.assertTrue(LayoutChoice(strategy=strategy).wants_peers(page_size=16))

    def test_a_strategy_that_keeps_a_page_on_two_ranks_is_refused(self) -> None:
        sys.path.insert(0, str(FAULTY_LAYOUTS))
        self.addCleanup(sys.path.remove, str(FAULTY_LAYOUTS))
        message = r"^--kv-layout-strategy two_copies: ranks 0 to 3 store lanes 0, 1, 0, 1 of 2; accepted: 4 lanes"
        with self.assertRaisesRegex(LayoutConfigError, message):
            self._check({"tp_size": 4}, shard_size=4, strategy="two_copies")

    def test_without_our_flags_nothing_is_looked_at(self) -> None:
        with mock.patch.object(server_args, "server_facts", side_effect=AssertionError):
            server_args.check(lambda _: None, sglang_args.ServerArgs(model_path="none"))

    def _check(self, fields: dict[str, Any], shard_size: int = 2, strategy: str = "cp_shared") -> Any:  # noqa: ANN401  # ServerArgs
        """Run the hook on a real record; only the model's configuration, which would be a file, is given."""
        build = server_args.keyword_factory(sglang_args.ServerArgs)
        record = build(**{**GOOD, **fields}, kv_layout_strategy=strategy)
        facts = ServerFacts(args=resolving_view(record), shard_size=shard_size, **self.FACTS)
        with mock.patch.object(server_args, "server_facts", return_value=facts):
            server_args.check(lambda _: None, record)
        return record


if __name__ == "__main__":
    unittest.main()
