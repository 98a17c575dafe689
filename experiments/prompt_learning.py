"""Whether a model that learns from a prompt predicts its true continuation better: the packaged model
``transformer-xl-shakespeare`` on the second half of the held-out tenth of Tiny Shakespeare.

Run it with ``python -m experiments.prompt_learning --data input.txt --out FOLDER``; without ``--data`` the
text is downloaded.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from experiments.tiny_shakespeare import load_packaged, read_shakespeare
from memformers.common.command_line import cli_errors, parse_arguments
from memformers.common.files import csv_text, write_json, write_text
from memformers.common.intervals import mean_of
from memformers.common.machine import describe_environment
from memformers.evaluation.evaluate import evaluate
from memformers.evaluation.learning import STREAMS_OF_LEARNING, LearnConfig, learned
from memformers.models.language_model import MemoryLM

MODEL = "transformer-xl-shakespeare"
LEARN = LearnConfig()
PROMPT_LENGTHS = (256, 1024)
"""In tokens, whole segments."""
N_PREDICTED = 256
"""Tokens of a continuation that are predicted."""
DISTANCE = 1024
"""Tokens from one continuation to the next."""


@dataclass(frozen=True)
class PromptLearning:
    """Measure the loss of continuations, with and without learning from their prompts, on one thread."""

    data: str = ""
    """The file of Tiny Shakespeare; by default the one that a training run uses."""
    out: Path = Path("runs/prompt-learning")
    """The folder for results.csv and results.json."""

    def run(self) -> None:
        torch.set_num_threads(1)
        corpus = read_shakespeare(self.data)
        tokens = torch.as_tensor(corpus.validation.tokens).long()
        model = load_packaged(MODEL, corpus)
        rows = []
        for n_prompt in PROMPT_LENGTHS:
            arm = f"prompt-{n_prompt}"
            saved = []
            for number, text in enumerate(texts_of(tokens, n_prompt)):
                static = continuation_losses(model, text, n_prompt, None).mean().item()
                learning = continuation_losses(model, text, n_prompt, LEARN).mean().item()
                rows.append(("static", arm, number, static))
                rows.append(("learning", arm, number, learning))
                saved.append(static - learning)
            difference = mean_of(saved)
            print(f"{n_prompt} tokens: learning saves {difference.mean:.4f} ± {difference.half_width:.4f}")
        self.out.mkdir(parents=True, exist_ok=True)
        write_text(self.out / "results.csv", csv_text(("measure", "arm", "seed", "value"), rows))
        facts = {
            "corpus": {"name": corpus.info.name, "sha256": corpus.info.sha256},
            "model": MODEL,
            "learn": asdict(LEARN),
            "predicted tokens": N_PREDICTED,
            "environment": describe_environment(torch.device("cpu")),
        }
        write_json(self.out / "results.json", facts)


def texts_of(tokens: Tensor, n_prompt: int) -> Iterator[Tensor]:
    """Prompts of ``n_prompt`` tokens with their continuations, of the second half of ``tokens [n]``, on which
    no learning rate was chosen. Continuations are the same for all lengths."""
    # The longest prompt must fit in the second half, too.
    first = len(tokens) // 2 + max(PROMPT_LENGTHS)
    for begin in range(first, len(tokens) - N_PREDICTED, DISTANCE):
        yield tokens[begin - n_prompt : begin + N_PREDICTED + 1]


def continuation_losses(model: MemoryLM, text: Tensor, n_prompt: int, learn: LearnConfig | None) -> Tensor:
    """The losses in nats of the tokens of ``text [n]`` after the first ``n_prompt`` predicted ones. With
    ``learn``, the model learns the prompt, then reads it again, as in ``generate --learn``."""
    if learn is None:
        return losses_of(model, text)[n_prompt:]
    with learned(model, text[: n_prompt + 1], STREAMS_OF_LEARNING, learn):
        return losses_of(model, text)[n_prompt:]


def losses_of(model: MemoryLM, text: Tensor) -> Tensor:
    """The losses ``[n − 1]`` of ``text [n]``, in nats."""
    losses: list[Tensor] = []
    evaluate(model, text, 1, progress=losses.append)
    return torch.cat(losses)


if __name__ == "__main__":
    with cli_errors():
        parse_arguments(PromptLearning).run()
