"""Weights and checkpoints in and out: our own, labml-nn's, and the original Transformer-XL's."""
