"""Training: its config, the training loop, and runs, the folders that contain everything about one
training."""
