"""What two published models ask of 1, 8 and 64 GPUs, on paper."""
