"""Training: its config, the one loop, and runs, which are folders that hold all about one training."""
