"""What is the strategy's own: stripes, settings, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
from keyed_layout import KeyedLayout

from sglang.srt.mem_cache.layouts import (
    CpHiCacheNodeMetadata,
    GroupKind,
    KVLayoutStrategy,
    LayoutConfig,
    LayoutConfigError,
    LayoutEnvironment,
    PoolKind,
    StorageAwareLayout,
    create_layout,
    known_layouts,
)

LAYOUT = KeyedLayout(page_size=64, shard_size=4, shard_rank=1, stripe_pages=2)
FITTING = LayoutEnvironment(
    pool_kind=PoolKind.MLA,
    pool_class="MLATokenToKVPool",
    page_size=64,
    allocator_lanes=4,
    group_kind=GroupKind.ATTENTION_TP,
    shard_size=4,
    shard_rank=1,
)

# One assignment for each protocol: mypy compares every signature.
strategy: KVLayoutStrategy[CpHiCacheNodeMetadata] = LAYOUT
storage_aware: StorageAwareLayout = LAYOUT


def test_a_stripe_stays_in_one_lane_and_the_next_one_follows_wherever_a_node_begins() -> None:
    assert LAYOUT.extend_lanes(1, 0, 10).tolist() == [1, 1, 2, 2, 3, 3, 0, 0, 1, 1]
    assert LAYOUT.extend_lanes(1, 3, 4).tolist() == [2, 3, 3, 0]


def test_any_prefix_is_spread_to_within_one_stripe() -> None:
    for pages in range(1, 40):
        lanes = LAYOUT.extend_lanes(3, 0, pages).tolist()
        counts = [lanes.count(lane) for lane in range(4)]
        assert max(counts) - min(counts) <= LAYOUT.stripe_pages


def test_it_is_found_by_name_and_takes_its_settings_from_the_config() -> None:
    assert "keyed" in known_layouts()
    config = LayoutConfig(
        name="keyed", page_size=16, shard_size=2, shard_rank=1, options={"stripe_pages": 8, "store": "m-1"}
    )
    layout = create_layout(config)
    assert isinstance(layout, KeyedLayout)
    assert (layout.stripe_pages, layout.store, layout.lane_count, layout.lane) == (8, "m-1", 2, 1)
    assert isinstance(create_layout(LayoutConfig(name="keyed")), KeyedLayout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stripes": 4}, "layout 'keyed' has no setting 'stripes'; accepted: stripe_pages, store"),
        ({"stripe_pages": 0}, r"stripe_pages must be in \[1, 1024\], got 0"),
        ({"stripe_pages": "4"}, "stripe_pages must be a whole number, got '4'"),
        ({"stripe_pages": True}, "stripe_pages must be a whole number, got True"),
        ({"store": 4}, "store must be a string, got 4"),
        ({"store": "a/b"}, "store must be 1 to 64 letters, digits or '-', got 'a/b'"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_value_and_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutConfigError, match=f"^--kv-layout-config: {message}$"):
        create_layout(LayoutConfig(name="keyed", options=options))


def test_it_fits_what_it_was_built_for() -> None:
    LAYOUT.validate(FITTING)
    LAYOUT.validate(dataclasses.replace(FITTING, pool_kind=PoolKind.DSA))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (dataclasses.replace(FITTING, storage_backend="file"), "--hicache-storage-backend file"),
        (dataclasses.replace(FITTING, pool_kind=PoolKind.OTHER, pool_class="SWAKVPool"), "the KV pool SWAKVPool"),
        (dataclasses.replace(FITTING, pool_kind=PoolKind.MHA), "every rank holds other heads"),
        (dataclasses.replace(FITTING, page_size=16), "built for page size 64, but here it is 16"),
        (dataclasses.replace(FITTING, shard_size=8), "built for shard group size 4"),
        (dataclasses.replace(FITTING, shard_rank=0), "built for shard group rank 1"),
        (dataclasses.replace(FITTING, allocator_lanes=1), "built for allocator lanes 4"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(environment: LayoutEnvironment, message: str) -> None:
    with pytest.raises(LayoutConfigError, match=message) as caught:
        LAYOUT.validate(environment)
    assert str(caught.value).startswith("--kv-layout-strategy keyed ")
    assert "\n" not in str(caught.value)
