"""The rows that a replay keeps, those of a large model.

Imports no SGLang class, so that the starting process can count their bytes.
"""

from __future__ import annotations

from sglang.srt.mem_cache.hicache.device.geometry import DsaGeometry, Geometry, MhaGeometry, MlaGeometry
from sglang.srt.mem_cache.layouts import PoolKind

GEOMETRIES: dict[PoolKind, Geometry] = {
    PoolKind.MLA: MlaGeometry(kv_lora_rank=512, qk_rope_head_dim=64),
    PoolKind.DSA: DsaGeometry(),
    PoolKind.MHA: MhaGeometry(heads=1, head_dim=128),
}
