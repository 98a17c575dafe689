"""Weights of other programs' models for ours: labml-nn's, the original Transformer-XL's, Hugging Face's."""
