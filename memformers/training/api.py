"""Training and evaluation from Python, a call each: what a notebook or another program needs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memformers.common.files import read_json
from memformers.common.machine import choose_device
from memformers.convert.load import load_checkpoint
from memformers.data.tokenizer import Tokenizer
from memformers.evaluation.evaluate import evaluate as evaluate_tokens
from memformers.evaluation.evaluate import summary
from memformers.evaluation.units import encoded, units
from memformers.models.language_model import MemoryLM
from memformers.models.registry import short_name
from memformers.runs.folder import RESULT, new_folder, read_metrics
from memformers.training.config import TrainConfig, check_all_used
from memformers.training.run import train_run


@dataclass(frozen=True)
class TrainedModel:
    """What [`train`][memformers.training.api.train] returns: a model, and what its training measured.

    Examples:
        >>> from memformers import ModelConfig, TrainConfig, generate, train
        >>> network = ModelConfig(d_model=32, n_layers=1, segment_len=16, mem_len=16)
        >>> config = TrainConfig(model=network, data="builtin", tokens=1_000, batch_size=8)
        >>> run = train(config, "runs/small")  # doctest: +ELLIPSIS
        transformer-xl: ...
        >>> tokens = run.tokenizer.encode("ROMEO:")[:, None]  # [P, 1]
        >>> len(list(generate(run.model, tokens, max_new_tokens=20)))
        20
    """

    model: MemoryLM = field(repr=False)
    """The model of the newest checkpoint, in eval mode."""
    tokenizer: Tokenizer = field(repr=False)
    """Its tokenizer: ``encode`` gives the tokens of a text, ``decode`` the text of tokens."""
    folder: Path
    """The folder of the run, which the commands take too, as in ``memformers report FOLDER``."""
    metrics: list[dict[str, float]] = field(repr=False)
    """Every record of the training, in order. All have ``tokens`` and ``seconds``; some have ``loss.train``
    and others ``loss.valid``, in nats per token."""
    result: dict[str, Any] = field(repr=False)
    """The last evaluation of the held-out text: ``loss`` in nats per token, ``bits_per_character``,
    ``accuracy`` and more, as in ``result.json``."""


def train(
    config: TrainConfig, folder: str | Path | None = None, *, resume: bool = False, dashboard: str = ""
) -> TrainedModel:
    """Train a model on a text as ``memformers train`` does, with its checkpoints, records and dashboard.

    Ctrl-C, or the stop button of a notebook, ends the training after a checkpoint.

    Args:
        config: What to train, on which text and for how long.
        folder: The folder of the run; by default a new one in ``runs/``.
        resume: Whether a run in ``folder`` continues from its newest checkpoint. A finished one is only
            loaded; if there is none, a new run begins.
        dashboard: The address of a labml server; by default a dashboard on this machine is found.

    Returns:
        The trained model with its tokenizer and what was measured.

    Raises:
        ValueError: For a text or config that can't be used, a folder that already has another run, and a
            training that diverged.
        OSError: If the folder can't be written.

    Examples:
        >>> from memformers import ModelConfig, TrainConfig, train
        >>> network = ModelConfig(model="compressive", d_model=32, n_layers=2, segment_len=16, mem_len=16)
        >>> config = TrainConfig(model=network, data="builtin", tokens=5_000, batch_size=8)
        >>> run = train(config, "runs/first")  # doctest: +ELLIPSIS
        compressive: ... parameters, 5,000 tokens → runs/first
        corpus: ...
        >>> sorted(run.result)[:3]
        ['accuracy', 'bits_per_byte', 'bits_per_character']
    """
    check_all_used(config)
    place = new_folder(short_name(config.model.model)) if folder is None else Path(folder)
    place = train_run(config, place, dashboard, resume=resume)
    model, tokenizer = load_checkpoint(place, choose_device(config.device))
    return TrainedModel(model, tokenizer, place, read_metrics(place), read_json(place / RESULT))


def evaluate(
    model: MemoryLM, tokenizer: Tokenizer, text: str | Sequence[str], *, streams: int = 16
) -> dict[str, float]:
    """Measure how well a model predicts a text, from its beginning to its end, with the memory carried along.

    Args:
        model: The model, whose segment and memories are as long as in training.
        tokenizer: Its tokenizer.
        text: A text; or several documents, each of which is read from an empty memory.
        streams: The number of parallel streams into which a text is cut. Each starts with an empty memory, so
            fewer streams are stricter, and slower. Of documents, how many are read in parallel, which doesn't
            change the result.

    Returns:
        ``loss_nats`` per token and ``uncertainty_nats``, half of its 95 % confidence interval;
        ``bits_per_character``, ``bits_per_byte``, ``word_perplexity``, ``accuracy``, and the number of
        predicted ``tokens``.

    Raises:
        ValueError: For a text with characters that the tokenizer doesn't have, and for one in which nothing
            can be predicted.

    Examples:
        >>> from memformers import MemoryLM, ModelConfig, evaluate
        >>> from memformers.data.tokenizers import ByteTokenizer
        >>> model = MemoryLM(ModelConfig(vocab_size=256, d_model=32, n_layers=2))
        >>> numbers = evaluate(model, ByteTokenizer(), "To be, or not to be. " * 50)
        >>> numbers["tokens"]
        1049
    """
    split = encoded(
        tokenizer, [text] if isinstance(text, str) else text, are_documents=not isinstance(text, str)
    )
    documents = tuple(split.documents.tolist())
    found = evaluate_tokens(model, split.tokens, streams, documents=documents)
    return summary(found, units(tokenizer, split))
