"""The radix tree: nodes, locks, and who leaves which tier when."""
