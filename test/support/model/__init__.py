"""A cache in plain sets, and the machine that compares it with a real one."""
