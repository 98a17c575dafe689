"""Weights and checkpoints: our own format, trained models of the package, labml-nn's and the original
Transformer-XL's weights."""
