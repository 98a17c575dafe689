"""The Python source code of this machine in subwords, which experiments on long texts read."""

from pathlib import Path

from memformers.data.benchmarks import PYTHON_SOURCE
from memformers.data.gathering import Recipe
from memformers.data.preparing import prepare


def prepared_python_source(folder: Path, vocab_size: int) -> str:
    """The path of its tokens in ``folder``, which are prepared if they aren't there."""
    tokens = folder.resolve() / "tokens"
    if not tokens.exists():
        prepare(Recipe(Path(PYTHON_SOURCE), PYTHON_SOURCE, "", "bpe", vocab_size), tokens)
    return str(tokens)
