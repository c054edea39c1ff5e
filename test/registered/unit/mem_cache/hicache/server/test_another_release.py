"""Beside an SGLang whose names are not those that we know, our flags get one line and nothing of ours is in place.

Each case is a process in which SGLang is real but for one name, which is gone as soon as its module has been loaded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from sglang.srt.mem_cache.hicache.releases import supported_releases
from sglang.srt.mem_cache.hicache.server import help as flags_in_help
from sglang.srt.mem_cache.hicache.server import hook_table, hooks
from support.server_cases import sglang_args

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

BOTH, NEWEST = " or ".join(supported_releases()), supported_releases()[-1]
LINE = f"needs SGLang {BOTH}, got 9.9.9; install sglang=={NEWEST} or drop the flag"
FLAG = "--kv-layout-strategy"
PROGRAM = Path(__file__).parents[5] / "support" / "another_release.py"
AN_IMPORT_OF_OURS = "sglang.srt.mem_cache.l2_transfer:L2TransferEngine"
THE_TARGET_OF_A_HOOK = "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator.configure"


def _run(gone: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), gone, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


class TestAnotherRelease(CustomTestCase):
    def test_a_flag_on_the_command_line_ends_the_process_with_one_line(self) -> None:
        done = _run(AN_IMPORT_OF_OURS, "serve", FLAG, "cp_shared")
        self.assertEqual((done.returncode, done.stderr.splitlines()[-1:]), (1, [f"error: {FLAG}: {LINE}"]))
        self.assertNotIn("Traceback", done.stderr)

    def test_config_files_and_engines_get_the_line_too_and_a_server_without_our_flags_is_sglangs(self) -> None:
        done = _run(THE_TARGET_OF_A_HOOK, "look")
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        found = json.loads(done.stdout.splitlines()[-1])
        self.assertEqual(found["file"], [2, f"{FLAG}: {LINE}"])
        self.assertEqual(found["engine"], f"{FLAG}: {LINE}")
        self.assertEqual(found["hooked"], ["sglang.srt.server_args.ServerArgs.add_cli_args"])
        self.assertEqual((found["plain"], found["backend"]), ("m", None))

    def test_a_platform_that_does_not_fit_is_none(self) -> None:
        with mock.patch.dict(sys.modules, {"sglang.srt.mem_cache.hicache.cpu.platform": None}):
            self.assertIsNone(flags_in_help.activate())


class TestHalfApplied(CustomTestCase):
    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        load_plugins()

    def test_where_a_hook_did_not_apply_the_parser_refuses_our_flags_and_takes_all_others(self) -> None:
        """SGLang logs it and goes on. Were it the hook that records the choice, nobody else would ever know of it."""
        stray = hooks.Hook(target=hook_table.HOOKS[1].target, function=lambda: None, kind=hook_table.HOOKS[1].kind)
        hooks.expect_hooks((stray, *hook_table.HOOKS[2:]))
        self.addCleanup(hooks.expect_hooks, hook_table.HOOKS)
        parser = argparse.ArgumentParser(prog="serve")
        sglang_args.ServerArgs.add_cli_args(parser)
        for given in ([FLAG, "cp_shared"], ["--kv-layout-config", "{}"], ["--enable-nsa-prefill-cp-shared-kv"]):
            with (
                self.subTest(given),
                mock.patch("sys.stderr.write") as write,
                self.assertRaisesRegex(SystemExit, "^2$"),
            ):
                parser.parse_args(["--model-path", "m", *given])
            (line,) = [call.args[0] for call in write.call_args_list]
            self.assertRegex(
                line, rf"^serve: error: {given[0]}: SGLang did not apply our hooks on .*from_cli_args; .*\n$"
            )
        self.assertEqual(parser.parse_args(["--model-path", "m"]).model_path, "m")


if __name__ == "__main__":
    unittest.main()
