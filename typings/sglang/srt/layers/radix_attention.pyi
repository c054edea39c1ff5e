class RadixAttention:
    layer_id: int
