"""The rows that a soak keeps: small ones, where SGLang lets them be.

Imports no SGLang class, so that the starting process can count their bytes.
"""

from __future__ import annotations

from sglang.srt.mem_cache.hicache.device.geometry import DsaGeometry, Geometry, MhaGeometry, MlaGeometry
from sglang.srt.mem_cache.layouts import PoolKind

GEOMETRIES: dict[PoolKind, Geometry] = {
    PoolKind.MLA: MlaGeometry(kv_lora_rank=16, qk_rope_head_dim=16),
    PoolKind.DSA: DsaGeometry(),
    PoolKind.MHA: MhaGeometry(heads=1, head_dim=16),
}
