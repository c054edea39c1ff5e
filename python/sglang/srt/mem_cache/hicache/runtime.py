"""SGLang's process-wide settings for a process that is not a server: a replay worker, a test, a benchmark.

SGLang's pools, controllers and trees read two globals: the published server args (``get_memory()`` and its
like) and this process's place among its peers (``get_parallel()``). A server fills both at launch.
Here `standalone_runtime` does, and takes them back afterwards.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_context, get_parallel, publish_role

from sglang.srt.mem_cache.layouts import LayoutConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.server_args import ServerArgs


@contextmanager
def standalone_runtime(
    *, rank: int = 0, world_size: int = 1, device: str = "cpu", **server_args: object
) -> Iterator[ServerArgs]:
    """Publish `server_args` for the duration; yields SGLang's `ServerArgs` that carry them.

    This process is tensor-parallel rank `rank` of `world_size`, in one pipeline stage, without context or data
    parallelism. `server_args` are `ServerArgs` fields by name (``page_size``, ``hicache_mem_layout``, ...). HiCache is
    on, with ``direct`` transfers, unless they say otherwise. No process group is made or needed: the caller of classes
    that communicate makes its own. Scopes nest; the previous settings return at the end, after an error as well.

    Raises `LayoutConfigError` for a rank outside the group, `RuntimeError` in a process that SGLang launched (its
    settings are the user's), and SGLang's `ValueError` for a field that `ServerArgs` does not have.
    """
    if not 0 <= rank < world_size:
        raise LayoutConfigError(f"rank must be in [0, {world_size - 1}], got {rank}")
    if (role := publish_role()) is not None:
        raise RuntimeError(f"this process serves as SGLang's {role}: its server args must not be replaced")
    fields: dict[str, object] = {
        "enable_hierarchical_cache": True,
        "hicache_io_backend": "direct",
        "served_model_name": "standalone",
        "tp_size": world_size,
        "device": device,
        **server_args,
    }
    ranks = {"tp_rank": rank, "attn_tp_rank": rank, "attn_cp_rank": 0, "attn_dp_rank": 0, "pp_rank": 0}
    with get_context().override_server_args(**fields) as published, get_parallel().override(**ranks):
        yield published
