"""What tests share: real caches and groups of ranks, their adversaries, and how they are watched."""
