"""A training run on two processes with a fault at regular intervals."""
