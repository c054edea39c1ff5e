"""What `kvlayouts check` says of this installation, and of one that does not fit."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import version
from unittest import mock

from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from kvlayouts import main as command
from sglang.srt.mem_cache.hicache.check import installation
from sglang.srt.mem_cache.hicache.check.hooked import misfits
from sglang.srt.mem_cache.hicache.check.installation import check_installation
from sglang.srt.mem_cache.hicache.releases import supported_releases
from sglang.srt.mem_cache.hicache.server import hook_table
from sglang.srt.mem_cache.hicache.server.hooks import Hook

register_cpu_ci(est_time=60, suite="base-a-test-cpu")


class TestCheck(CustomTestCase):
    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        load_plugins()

    def test_this_installation_passes_every_check(self) -> None:
        lines = list(check_installation())
        self.assertEqual([str(line) for line in lines if not line.passed], [])
        names = ["SGLang release", "hooks", "platform", "pool classes", "layout strategies", "signatures"]
        self.assertEqual([line.name for line in lines], names)

    def test_another_release_fails_with_what_to_install(self) -> None:
        known = supported_releases()
        with mock.patch.object(installation, "installed_release", return_value="0.5.19"):
            line, *_, signatures = check_installation()
        expected = f"FAILED  SGLang release: 0.5.19, needed: {' or '.join(known)}; install sglang=={known[-1]}"
        self.assertEqual(str(line), expected)
        # It is compared with the release that it is most like, here the one that is really installed.
        self.assertRegex(signatures.found, rf" as in {re.escape(version('sglang'))}$")

    def test_an_unknown_release_is_told_which_names_drifted(self) -> None:
        other = "9.9.9" if version("sglang") == supported_releases()[0] else "0.5.1"  # the other side of each condition
        with mock.patch.object(installation, "supported_releases", return_value=(other,)):
            *_, line = check_installation()
        self.assertFalse(line.passed)
        both = mock.patch.object(installation, "supported_releases", return_value=(version("sglang"), other))
        with both, mock.patch.object(installation, "installed_release", return_value="0.5.0"):
            *_, nearest = check_installation()
        self.assertTrue(nearest.passed, nearest.found)
        self.assertRegex(
            line.found, rf"^\d+ of \d+ names in \d+ modules differ from {re.escape(other)}: .*P2PTag\.\w+: is"
        )

    def test_a_missing_hook_fails_and_names_it_and_the_exit_status_is_1(self) -> None:
        hook = hook_table.HOOKS[0]
        stray = Hook(target=hook.target, function=lambda: None, kind=hook.kind)
        with (
            mock.patch.object(hook_table, "HOOKS", (stray,)),
            mock.patch.object(installation, "_CHECKS", installation._CHECKS[1:2]),  # noqa: SLF001  # hooks only
        ):
            (line,) = check_installation()
            self.assertFalse(line.passed)
            self.assertIn("ServerArgs.add_cli_args", line.found)
            self.assertIn("SGLANG_PLUGINS", line.mend)
            self.assertEqual(command.main(["check"]), 1)

    def test_a_hook_that_would_refuse_what_sglang_passes_is_named_with_the_reason(self) -> None:
        for number, function, reason in (
            (0, lambda _result: None, "ServerArgs.add_cli_args: too many positional arguments"),
            (1, lambda _original, _args: None, "ServerArgs.from_cli_args: too many positional arguments"),
            (1, lambda _original, _cls, namespace: namespace, "ServerArgs.from_cli_args: missing a required argument"),
            (3, lambda _original, _self, *, sizes: sizes, "got an unexpected keyword argument 'is_dsa_model'"),
            (
                8,
                lambda _original, _self, forward_batch, layer_id, key, *, act_quant, out_cache_loc=None: None,
                "'act_quant'",
            ),
        ):
            changed = replace(hook_table.HOOKS[number], function=function)
            with (
                self.subTest(reason),
                mock.patch.object(hook_table, "HOOKS", (changed,)),
                mock.patch.object(installation, "_CHECKS", installation._CHECKS[1:2]),  # noqa: SLF001  # hooks only
            ):
                (misfit,) = misfits(hook_table.HOOKS)
                self.assertIn(reason, misfit)
                with mock.patch("sglang.srt.mem_cache.hicache.server.hooks.refuse_missing_hooks"):
                    (line,) = check_installation()
                self.assertEqual(line.found, f"do not take what SGLang passes: {misfit}")
                self.assertFalse(line.passed)

    def test_a_check_that_raises_is_a_failed_line_and_the_others_go_on(self) -> None:
        with mock.patch.object(installation, "known_layouts", side_effect=RuntimeError("broken")):
            lines = {line.name: line for line in check_installation()}
        self.assertEqual(lines["layout strategies"].found, "RuntimeError: broken")
        self.assertTrue(lines["signatures"].passed)

    def test_a_strategy_that_cannot_be_built_is_named(self) -> None:
        with mock.patch.object(installation, "known_layouts", return_value=("identity", "gone")):
            lines = {line.name: line for line in check_installation()}
        line = lines["layout strategies"]
        self.assertFalse(line.passed)
        self.assertRegex(line.found, "^gone: LayoutConfigError: --kv-layout-strategy must be one of .*, got 'gone'$")
        self.assertEqual(line.mend, "without settings it must build for two ranks and pages of 64 tokens")
