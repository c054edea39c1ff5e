"""What differs between the SGLang releases that this distribution supports; nothing else knows releases.

One module a family of releases, with the same names in each, and one that chooses among them by a feature::

    chosen in      until_0_5_20                        since_0_5_23
    sglang         pools and ratios make host pools    descriptions of buffers do
                   layer_num=, HIRADIX_PP_SYNC         transfer_layer_id_max=, HICACHE_PP_SYNC
    calls          cache_(un)finished_req              checkpoint, on_release, touch_prefix
                   a match has slots, a load returns   both count tokens
                   them; chunks are no uses            what a request inserted before is no use
    models         ParallelState says what is sharded  widths are published
    platforms      a pool class by its own name        get_kv_pool_cls(kind=...)
    trees          HiRadixCache, UnifiedRadixCache     UnifiedRadixCache: for comparisons only
    server_flags   each name by the field that makes the difference
    installed      which release it is, for those who refuse the others

The core has types of its own (`tree.calls`); what SGLang's scheduler calls is translated here.
"""
