"""Text: corpora, tokenizers, and parallel contiguous streams of segments."""
