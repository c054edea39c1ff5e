"""CUDA graphs of a server whose ranks share pages out: switched off unless the user insists, which is refused.

A captured graph replays the same reads; which pages a batch needs from other ranks is only known when it runs. SGLang
switches graphs off itself where they do not fit, and so does a layout strategy, in the parent process, before anything
is spawned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def phases_with_graphs(server_args: ServerArgs) -> frozenset[str]:
    """Phases (``decode``, ``prefill``) that would be captured, once SGLang has resolved its settings."""
    config = resolving_view(server_args).cuda_graph_config
    return frozenset(phase for phase in Phase.ALL if getattr(config, phase).backend != Backend.DISABLED)


def phases_asked_for(server_args: ServerArgs) -> frozenset[str]:
    """Those of `phases_with_graphs` whose backend the user named."""
    named = getattr(server_args, "_cuda_graph_config_locked", ())  # (phase, setting) of what did not come by default
    return frozenset(phase for phase in phases_with_graphs(server_args) if (phase, "backend") in named)


def turn_graphs_off(server_args: ServerArgs) -> None:
    """Declare, as SGLang's own handlers do, that no phase is captured. `ValueError` once the settings are published."""
    config = resolving_view(server_args).cuda_graph_config
    for phase in Phase.ALL:
        config = with_phase(config, phase, backend=Backend.DISABLED)
    declare_resolution(server_args, "kv_layout_strategy", cuda_graph_config=config)
