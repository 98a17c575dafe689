"""Corpora, tokenizers, datasets of tokens, and the streams in which models read them."""

TRAIN, VALIDATION, TEST = SPLITS = "train", "validation", "test"  # to learn from, to choose by, to claim on
