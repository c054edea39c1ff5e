"""Keys: the same wherever and whenever they are computed, different for whatever has other bytes or another place."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keyed_layout import KeyedLayout, PageKey

from sglang.srt.mem_cache.layouts import LayoutInvariantError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.layouts import StorageAwareLayout

PAGE = hashlib.sha256(b"a page").hexdigest()


def make_group(shard_size: int = 4, **settings: Any) -> list[KeyedLayout]:  # noqa: ANN401  # settings of the strategy
    ranks = range(shard_size)
    return [KeyedLayout(page_size=64, shard_size=shard_size, shard_rank=rank, **settings) for rank in ranks]


def test_a_key_is_written_as_it_always_was() -> None:
    layout: StorageAwareLayout = make_group(store="model-bf16")[2]
    lanes = np.array([2], dtype=np.int16)
    assert layout.storage_keys([PAGE], lanes) == [
        "9a8eeff1d0bc6b9b7acf170b1168d6d07f193dc770d4c1864b03e48d775e8d1a.model-bf16.keyed.64.2of4"
    ]


@given(lanes=st.lists(st.integers(0, 3), max_size=20))
def test_the_ranks_together_name_each_page_once_and_each_rank_its_own_in_node_order(lanes: list[int]) -> None:
    group = make_group()
    hashes = [hashlib.sha256(bytes([page])).hexdigest() for page in range(len(lanes))]
    wanted = [str(group[0].page_key(page, lane)) for page, lane in zip(hashes, lanes, strict=True)]
    for rank, layout in enumerate(group):
        own = [key for key, lane in zip(wanted, lanes, strict=True) if lane == rank]
        assert layout.storage_keys(hashes, np.array(lanes, dtype=np.int16)) == own


def test_every_rank_computes_the_same_key_for_a_page_of_any_lane() -> None:
    for lane in range(4):
        assert len({str(layout.page_key(PAGE, lane)) for layout in make_group()}) == 1


def test_keys_differ_by_content_shard_group_size_page_size_and_store() -> None:
    def key(page_size: int = 64, shard_size: int = 4, lane: int = 1, page: str = PAGE, store: str = "kv") -> str:
        layout = KeyedLayout(page_size=page_size, shard_size=shard_size, shard_rank=0, store=store)
        return str(layout.page_key(page, lane))

    changed = (key(page_size=32), key(shard_size=8), key(lane=2), key(page=PAGE[::-1]), key(store="other"))
    assert len({key(), *changed}) == 6
    assert key() == key()


def test_a_key_does_not_depend_on_how_pages_were_dealt() -> None:
    assert make_group(stripe_pages=1)[0].page_key(PAGE, 3) == make_group(stripe_pages=8)[0].page_key(PAGE, 3)


@pytest.mark.parametrize("text", ["", PAGE, f"{PAGE}.kv.cp_shared.64.1of4", f"{PAGE}.a/b.keyed.64.1of4"])
def test_a_text_that_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a key of layout keyed"):
        PageKey.parse(text)


def test_a_key_can_be_read_back_and_is_short_enough_for_a_file_name() -> None:
    key = make_group(shard_size=32_767, store="s" * 64)[0].page_key(PAGE, 32_766)
    assert PageKey.parse(str(key)) == key
    assert len(str(key)) < 200
    assert "/" not in str(key)


def test_hashes_and_lanes_of_different_nodes_are_refused() -> None:
    with pytest.raises(LayoutInvariantError, match="1 page hashes for 2 pages"):
        make_group()[0].storage_keys([PAGE], np.zeros(2, dtype=np.int16))
    with pytest.raises(ValueError, match=r"lane must be in \[0, 3\], got 4"):
        make_group()[0].page_key(PAGE, 4)
