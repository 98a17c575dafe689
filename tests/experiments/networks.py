"""A network of moments, for tests of memories in files."""

TINY = {"vocab_size": 7, "d_model": 8, "n_heads": 2, "n_layers": 2, "d_ff": 8, "segment_len": 5}
