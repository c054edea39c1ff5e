"""`kvlayouts soak`: hours of faults in minutes, on real ranks, checked all the while."""
