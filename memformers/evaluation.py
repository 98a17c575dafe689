"""Evaluation over a whole text: contiguous, in eval mode, from an empty memory, memory carried."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.data.streams import IGNORED, evaluation_segments, stream_length
from memformers.language_model import MemoryLM, eval_mode
from memformers.memory import Memory


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text."""

    loss: float
    """Mean over all predictions, in nats a token."""
    accuracy: float
    """Fraction of tokens that were the likeliest prediction."""
    reconstruction_loss: float | None
    """Mean attention-reconstruction loss of the segments in which something was compressed."""
    correct: Tensor
    """bool ``[n - 1]``: whether token 1, 2, … of the text was the likeliest prediction."""
    stream_length: int
    """Tokens a stream; token t of the text is in stream ⌊(t − 1) / stream_length⌋."""

    def bits_per_character(self, characters: int) -> float:
        """The whole text's loss in bits, spread over its number of characters."""
        return self.loss / math.log(2) * len(self.correct) / characters


@torch.no_grad()
def evaluate(model: MemoryLM, tokens: Tensor, batch_size: int) -> Evaluation:
    """Predict ``tokens [n]`` once over, in ``batch_size`` parallel streams of segments as long as
    in training; the model is left in the mode it came in.

    Fewer streams are stricter and slower: each begins with nothing remembered.
    """
    batch_size = min(batch_size, len(tokens) - 1)
    device = model.head.weight.device
    total, reconstruction = torch.zeros((), dtype=torch.float64), []
    hits, memory = [], Memory(())
    with eval_mode(model):
        for segment in evaluation_segments(tokens, batch_size, model.config.segment_len):
            targets = segment.targets.to(device)
            logits, memory, auxiliary_loss = model(segment.inputs.to(device), memory)
            loss = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            total += loss.double().cpu()
            hits.append((logits.argmax(-1) == targets).cpu())  # [S, B]
            if auxiliary_loss > 0:
                reconstruction.append(auxiliary_loss.item())
    correct = torch.cat(hits).T.flatten()[: len(tokens) - 1]
    return Evaluation(
        loss=total.item() / len(correct),
        accuracy=correct.double().mean().item(),
        reconstruction_loss=sum(reconstruction) / len(reconstruction) if reconstruction else None,
        correct=correct,
        stream_length=stream_length(len(tokens), batch_size),
    )
