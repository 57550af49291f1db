"""What a cluster can do and how to cut it: times, memory bounds, the split, the swap rule. Pure; starts nothing."""
