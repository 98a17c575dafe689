"""Text continued by a trained model."""

from pathlib import Path

import torch

from memformers.data.tokenizers import Tokenizer, load_tokenizer
from memformers.language_model import MemoryLM


def continue_text(
    model: MemoryLM,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> str:
    """What the model writes after ``prompt``; see :meth:`MemoryLM.generate` for the options.

    Raises ValueError for an empty prompt and for characters outside the vocabulary.
    """
    if not prompt:
        raise ValueError("the prompt is empty; give the text to go on from, at least one character.")
    tokens = tokenizer.encode(prompt).to(model.head.weight.device)[:, None]  # [P, 1]
    text = model.generate(
        tokens, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    return tokenizer.decode(text[len(tokens) :, 0])


def load_checkpoint(folder: Path, device: torch.device) -> tuple[MemoryLM, Tokenizer]:
    """The model and tokenizer in ``folder``, a run's or its ``checkpoint``; else ValueError."""
    if (folder / "checkpoint").is_dir():
        folder = folder / "checkpoint"
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no checkpoint; name a run's folder.")
    model, tokenizer = MemoryLM.from_pretrained(folder, device), load_tokenizer(folder)
    if model.config.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"{folder} has a model of {model.config.vocab_size} tokens and a tokenizer of "
            f"{tokenizer.vocab_size}; they belong to different trainings."
        )
    return model, tokenizer
