"""Refusals that were written for a server, as the commands say them: with flags that the command has."""

from __future__ import annotations

import re
from dataclasses import replace

import click
import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kvlayouts.common.errors import RankError
from kvlayouts.common.own_flags import SAME_SETTING, in_own_words, options_of, own_words
from kvlayouts.main import cli
from sglang.srt.mem_cache.hicache.server.refusals import RULES
from sglang.srt.mem_cache.layouts import CpSharedLayout, GroupKind, LayoutConfigError, LayoutEnvironment, PoolKind

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

FITTING = LayoutEnvironment(
    pool_kind=PoolKind.MLA,
    pool_class="MLATokenToKVPool",
    page_size=64,
    allocator_lanes=4,
    group_kind=GroupKind.ATTENTION_TP,
    shard_size=4,
    shard_rank=0,
)
CHANGES = (
    {"pool_kind": PoolKind.OTHER, "pool_class": "OtherPool"},
    {"pool_kind": PoolKind.MHA, "pool_class": "MHATokenToKVPool"},
    {"page_size": 16},
    {"shard_size": 2},
    {"storage_backend": "file"},
)
COMMANDS = ("plan", "replay", "soak", "explain", "bench")


def _messages() -> list[str]:
    """Every row of the table, and the refusals of strategies."""
    messages = [rule.message("--kv-layout-strategy cp_shared") for rule in RULES]
    for changes in CHANGES:
        with pytest.raises(LayoutConfigError) as caught:
            CpSharedLayout(page_size=64, shard_size=4, shard_rank=0).validate(replace(FITTING, **changes))
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_its_own_options_and_calls_a_servers_flag_a_servers(command: str) -> None:
    options = options_of(cli.commands[command])
    for message in _messages():
        said = own_words(message, options)
        others = set(re.findall(r"(?<!a server's )(?<![\w-])--[a-z][a-z0-9-]*", said)) - options
        assert not others, said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_setting_that_a_command_has_under_another_name_is_not_called_a_servers(command: str) -> None:
    options = options_of(cli.commands[command])
    for flag, names in SAME_SETTING.items():
        if options & set(names):
            assert own_words(f"{flag} 3", options).removesuffix(" 3") in options


def test_what_a_rank_could_not_do_is_said_with_the_options_of_its_command() -> None:
    def fail(**_options: object) -> None:
        raise RankError("rank 1 of 2 failed: --hicache-ratio 9: too much; --hicache-size is 0")

    replay = click.Command("replay", params=cli.commands["replay"].params, callback=fail)
    with pytest.raises(RankError, match=r": --host-ratio 9: too much; a server's --hicache-size is 0$"):
        type(cli)(commands={"replay": replay}).main(["replay"], standalone_mode=False)


def test_without_a_command_a_strategy_is_a_layout_and_other_flags_stay() -> None:
    error = ValueError("--kv-layout-strategy a-b with --page-size 3, --kv-layout-strategy-x")
    assert in_own_words(error) == "--layout a-b with --page-size 3, --kv-layout-strategy-x"
