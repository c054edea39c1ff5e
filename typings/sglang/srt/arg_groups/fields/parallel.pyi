class Parallel:
    tp_size: int
    pp_size: int
    attn_cp_size: int
