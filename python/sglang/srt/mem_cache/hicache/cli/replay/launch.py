"""The target of a rank's process, importable without SGLang so that the starting process stays light."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sglang.srt.mem_cache.hicache.cli.replay.results import ReplayConfig
    from sglang.srt.mem_cache.hicache.cli.replay.trace import Trace


def start_rank(
    config: ReplayConfig, trace: Trace, rank: int, rendezvous: str, peer_seconds: float, pipe: Connection
) -> None:
    """Import SGLang (done already where the fork server preloaded it) and serve `rank`."""
    from sglang.srt.mem_cache.hicache.cli.replay.worker import serve_rank

    serve_rank(config, trace, rank, rendezvous, peer_seconds, pipe)
