"""Corpora, tokenizers, datasets of tokens, and the streams in which models read them."""

TRAIN, VALIDATION, TEST = SPLITS = "train", "validation", "test"
"""The parts of a dataset: to learn from, to choose by, and to claim on."""
