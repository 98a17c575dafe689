"""A training on two processes with a fault at regular intervals."""
