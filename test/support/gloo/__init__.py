"""Ranks in processes of their own that talk over gloo."""
