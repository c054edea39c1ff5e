"""Device slots: free pages by lane, and the runs in which they are handed out."""
