from sglang_releases import SINCE_0_5_23

if not SINCE_0_5_23:
    class ParallelState:
        tp_rank: int
        pp_rank: int
        dp_rank: int | None
        attn_tp_rank: int
        attn_cp_rank: int
        @staticmethod
        def trivial(**overrides: int | None) -> ParallelState: ...
