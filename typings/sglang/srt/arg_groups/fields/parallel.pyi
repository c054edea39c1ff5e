class Parallel:
    tp_size: int
    pp_size: int
