"""What `kvlayouts plan` knows of a model is what SGLang says of it: bytes, kinds, and what a server refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kvlayouts.common.errors import InputError
from kvlayouts.plan.model import read_model
from kvlayouts.plan.sglang_model import SGLangModel
from sglang.srt.mem_cache.hicache.device.pools import DsaGeometry, MhaGeometry, MlaGeometry, build_device_pool, bytes_of
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.server.refusals import RULES
from sglang.srt.mem_cache.layouts import PoolKind
from support.plan_models import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V3_2,
    DEEPSEEK_V4,
    FALCON_40B,
    GEMMA_3,
    GLM_5,
    GPT_OSS,
    JAMBA,
    KIMI_K2,
    LLAMA_4,
    LLAMA_70B,
    LLAVA,
    LONGCAT,
    MIMO_V2,
    MINIMAX_TEXT_01,
    NEMOTRON_H,
    NEMOTRON_NAS,
    QWEN_3,
    QWEN_3_NEXT,
    write_config,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kvlayouts.plan.model import ModelGeometry
    from kvlayouts.plan.options import KVCacheDtype
    from sglang.srt.mem_cache.hicache.device.pools import Geometry
    from support.plan_models import Config

register_cpu_ci(est_time=30, suite="base-a-test-cpu")


def _read(path: Path, dtype: KVCacheDtype = "auto", ranks: int = 8) -> ModelGeometry:
    return read_model(path, layout="identity", dtype=dtype, attention_tp_size=ranks)


@pytest.mark.parametrize(
    ("config", "dtype", "kind", "bytes_per_token"),
    [
        (DEEPSEEK_V3_2, "auto", PoolKind.DSA, 61 * (576 * 2 + 132)),
        (DEEPSEEK_V3_2, "fp8_e4m3", PoolKind.DSA, 61 * (656 + 132)),
        (GLM_5, "fp8_e4m3", PoolKind.DSA, 78 * (656 + 132)),
        (DEEPSEEK_V3, "auto", PoolKind.MLA, 61 * 576 * 2),
        (DEEPSEEK_V3, "fp8_e4m3", PoolKind.MLA, 61 * 576),
        (DEEPSEEK_V2, "bfloat16", PoolKind.MLA, 61 * 576 * 2),
        (KIMI_K2, "auto", PoolKind.MLA, 61 * 576 * 2),
        (LONGCAT, "auto", PoolKind.MLA, 2 * 28 * 576 * 2),
        (LLAMA_70B, "auto", PoolKind.MHA, 80 * 1 * 128 * 2 * 2),
        (LLAMA_70B | {"head_dim": 64, "num_key_value_heads": 16}, "fp8_e5m2", PoolKind.MHA, 80 * 2 * 64 * 2),
        (LLAMA_70B | {"num_key_value_heads": 64}, "auto", PoolKind.MHA, 80 * 8 * 128 * 2 * 2),
        (QWEN_3, "auto", PoolKind.MHA, 64 * 1 * 128 * 2 * 2),
        (LLAVA, "bfloat16", PoolKind.MHA, 80 * 1 * 128 * 2 * 2),
        (GEMMA_3, "auto", PoolKind.MHA, 48 * 1 * 256 * 2 * 2),  # SGLang gives its sliding layers whole rows
        (NEMOTRON_NAS, "auto", PoolKind.MHA, 3 * (64 // 8 // 8) * 128 * 2 * 2),
    ],
)
def test_bytes_of_a_token_are_those_of_sglangs_pools(
    config: Config, dtype: KVCacheDtype, kind: PoolKind, bytes_per_token: int, tmp_path: Path
) -> None:
    model = _read(write_config(tmp_path, config), dtype)
    assert (model.kind, model.bytes_per_token) == (kind, bytes_per_token)
    assert model.name == config["architectures"][0]
    assert _read(tmp_path, dtype) == model


@pytest.mark.parametrize(
    ("config", "geometry"),
    [
        (DEEPSEEK_V3_2, DsaGeometry()),
        (DEEPSEEK_V3, MlaGeometry()),
        (LLAMA_70B, MhaGeometry(heads=2, head_dim=128)),
    ],
    ids=["dsa", "mla", "mha"],
)
def test_a_real_pool_takes_those_bytes(config: Config, geometry: Geometry, tmp_path: Path) -> None:
    model = _read(write_config(tmp_path, config | {"num_hidden_layers": 2}), ranks=4)
    with standalone_runtime(page_size=64):
        pool = build_device_pool(geometry.kind, tokens=128, page_size=64, layers=2, geometry=geometry)
    assert model.kind is geometry.kind
    assert model.bytes_per_token * (128 + 64) == bytes_of(pool)


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (LLAMA_4, "a model with sliding-window layers"),
        (MIMO_V2, "a model with sliding-window layers"),
        (GPT_OSS, "a model with sliding-window layers"),
        (DEEPSEEK_V4, "a model with sliding-window layers"),
        (QWEN_3_NEXT, "a model with recurrent layers (Mamba, linear attention)"),
        (NEMOTRON_H, "a model with recurrent layers (Mamba, linear attention)"),
        (
            DEEPSEEK_V3_2 | {"index_kpool": 4},
            "a model with pooled index keys (index_kpool above 1)",
        ),
    ],
)
def test_a_model_that_a_server_refuses_is_refused_in_its_words(config: Config, setting: str, tmp_path: Path) -> None:
    (rule,) = (rule for rule in RULES if rule.setting == setting)
    with pytest.raises(InputError) as caught:
        _read(write_config(tmp_path, config))
    assert str(caught.value) == rule.message("--layout identity").replace("--kv-layout-strategy", "--layout")


@pytest.mark.parametrize("config", [MINIMAX_TEXT_01, JAMBA, FALCON_40B], ids=["minimax", "jamba", "falcon"])
def test_a_model_that_sglang_cannot_load_is_refused_in_its_words(config: Config, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"SGLang cannot use it: .*{config['architectures'][0]}"):
        _read(write_config(tmp_path, config))


@pytest.mark.parametrize(("changes", "heads"), [({}, 8), ({"new_decoder_architecture": False}, 1)])
def test_kv_heads_are_sglangs_total_whatever_the_key_is_called(changes: Config, heads: int, tmp_path: Path) -> None:
    model = SGLangModel(write_config(tmp_path, FALCON_40B | changes), kv_cache_dtype="auto")
    assert model.kv_bytes(attention_tp_size=1) == (60, 60 * heads * 64 * 2 * 2, 0)


def test_code_beside_a_config_is_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "it_ran"
    for name in ("configuration_decilm.py", "modeling_minimax_text_01.py", "configuration_minimax_text_01.py"):
        (tmp_path / name).write_text(f"open({str(trace)!r}, 'w')\n", encoding="utf-8")
    assert _read(write_config(tmp_path, NEMOTRON_NAS)).layers == 3
    with pytest.raises(InputError):
        _read(write_config(tmp_path, MINIMAX_TEXT_01))
    assert not trace.exists()


def test_code_of_a_repository_is_not_asked_for(tmp_path: Path) -> None:
    elsewhere = {"auto_map": {**MINIMAX_TEXT_01["auto_map"], "AutoModel": "nobody/nothing--modeling.Model"}}
    with pytest.raises(InputError, match="'AutoModel' is not present"):
        _read(write_config(tmp_path, MINIMAX_TEXT_01 | elsewhere))


def test_nothing_but_the_answer_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _read(write_config(tmp_path, DEEPSEEK_V3_2))
    assert capfd.readouterr() == ("", "")
