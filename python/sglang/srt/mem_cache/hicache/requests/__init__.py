"""The scheduler's requests: which pages they hold, and how those get into the tree."""
