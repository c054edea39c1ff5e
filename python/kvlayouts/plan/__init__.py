"""`kvlayouts plan`: how much memory to give a cache, from a model, a machine and a trace. Moves no KV."""
