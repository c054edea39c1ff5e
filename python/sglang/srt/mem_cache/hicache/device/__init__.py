"""Device pools: which kinds are served, how sharded ones are written and read."""
