"""Rank processes for the commands that need several: started from one fork server, heard, and always ended."""
