"""The Python source code of this machine in subwords, which experiments on long texts read."""

from pathlib import Path

from memformers.data.benchmarks import PYTHON_SOURCE
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import prepare


def prepared_python_source(folder: Path, vocab_size: int) -> str:
    """The path of its tokens in ``folder``, which are prepared if they aren't there."""
    tokens = folder.resolve() / "tokens"
    if not tokens.exists():
        prepare(CorpusSpec(tokenizer="bpe", vocab_size=vocab_size, corpus=PYTHON_SOURCE), tokens)
    return str(tokens)
