"""Evaluation over a whole text: contiguous, in eval mode, from an empty memory, memory carried."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.streams import IGNORED, evaluation_segments, stream_length
from memformers.data.text_files import bytes_of
from memformers.evaluation.intervals import half_width
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.stack import eval_mode

BLOCK = 500
"""Tokens whose mean loss counts as one observation in [`Evaluation.uncertainty`][]."""


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text."""

    loss: float
    """Mean over all predictions, in nats a token."""
    accuracy: float
    """Fraction of tokens that were the likeliest prediction."""
    reconstruction_loss: float | None
    """Mean attention-reconstruction loss of the segments in which something was compressed."""
    losses: Tensor
    """float32 ``[n - 1]``: the loss of token 1, 2, … of the text, in nats."""
    correct: Tensor
    """bool ``[n - 1]``: whether token 1, 2, … of the text was the likeliest prediction."""
    stream_length: int
    """Tokens a stream; token t of the text is in stream ⌊(t − 1) / stream_length⌋."""

    def bits_per_character(self, characters: int) -> float:
        """The whole text's loss in bits, spread over its number of characters."""
        return self.loss / math.log(2) * len(self.correct) / characters

    def perplexity(self, words: int) -> float:
        """Per word: e to the whole text's loss in nats, spread over its number of words."""
        nats = self.loss * len(self.losses) / words
        return math.exp(nats) if nats < 700 else math.inf

    @property
    def uncertainty(self) -> float:
        """Half the width of a 95 % confidence interval of the loss, in nats a token, for other texts of
        this kind and length; from means over blocks, since neighbouring tokens are alike in difficulty.
        NaN for a text of fewer than two blocks."""
        blocks = self.losses[: len(self.losses) // BLOCK * BLOCK].view(-1, BLOCK).double().mean(1)
        return half_width(blocks)

    def by_position(self, segment_len: int) -> list[float]:
        """Mean loss at each position of a segment, in nats a token."""
        place = torch.arange(len(self.losses)) % self.stream_length
        return group_means(self.losses, place % segment_len).tolist()

    def by_memory(self, segment_len: int, reach: int) -> list[tuple[int, float, float]]:
        """What memory is worth: the positions that a segment's stream has read before it, of which it
        can remember ``reach``; the mean loss of the segments that have so many; and half the width of
        its 95 % confidence interval, NaN where only one stream has. In nats a token.

        A stream counts as one observation, since its neighbouring segments are alike in difficulty.
        """
        stream = torch.arange(len(self.losses)) // self.stream_length
        place = torch.arange(len(self.losses)) % self.stream_length
        before = (place // segment_len * segment_len).clamp(max=reach)
        found = []
        for length in before.unique().tolist():
            same = before == length
            of_streams = group_means(self.losses[same], stream[same])
            found.append((length, self.losses[same].double().mean().item(), half_width(of_streams)))
        return found


def group_means(values: Tensor, group: Tensor) -> Tensor:
    """The mean of ``values [n]`` in each group 0, 1, …, float64."""
    sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add(0, group, values.double())
    return sums / torch.bincount(group)


@torch.no_grad()
def evaluate(
    model: MemoryLM,
    tokens: Tensor,
    batch_size: int,
    between_segments: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Predict ``tokens [n]`` once over, in ``batch_size`` parallel streams of segments as long as
    in training; the model is left in the mode it came in.

    Fewer streams are stricter and slower: each begins with nothing remembered. ``between_segments`` may end
    it by raising what it likes.
    """
    batch_size = min(batch_size, len(tokens) - 1)
    device = model.device
    losses, hits, reconstruction, memory = [], [], [], Memory(())
    with eval_mode(model):
        for segment in evaluation_segments(tokens, batch_size, model.config.segment_len):
            between_segments()
            targets = segment.targets.to(device)
            logits, memory, auxiliary_loss = model(segment.inputs.to(device), memory)
            loss = F.cross_entropy(
                in_full(logits).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
            )
            losses.append(loss.view_as(targets).cpu())  # [S, B]
            hits.append((logits.argmax(-1) == targets).cpu())  # [S, B]
            if auxiliary_loss > 0:
                reconstruction.append(auxiliary_loss.item())
    correct, of_each = (torch.cat(x).T.flatten()[: len(tokens) - 1] for x in (hits, losses))
    return Evaluation(
        loss=of_each.double().mean().item(),
        accuracy=correct.double().mean().item(),
        reconstruction_loss=sum(reconstruction) / len(reconstruction) if reconstruction else None,
        losses=of_each,
        correct=correct,
        stream_length=stream_length(len(tokens), batch_size),
    )


def in_full(logits: Tensor) -> Tensor:
    """Logits, of any shape, in float32 where they are in half precision, so that losses are not rounded
    to it."""
    return logits.float() if logits.element_size() < 4 else logits


def summary(evaluation: Evaluation, text: str) -> dict[str, float]:
    """The numbers that papers compare, for the ``text`` that was evaluated. All but the first token are
    predicted; a word is what white space separates."""
    return {
        "loss_nats": evaluation.loss,
        "uncertainty_nats": evaluation.uncertainty,
        "bits_per_character": evaluation.bits_per_character(max(len(text) - 1, 1)),
        "bits_per_byte": evaluation.bits_per_character(max(len(bytes_of(text)) - 1, 1)),
        "word_perplexity": evaluation.perplexity(max(len(text.split()), 1)),
        "accuracy": evaluation.accuracy,
        "tokens": len(evaluation.losses),
    }


def with_lengths(
    model: MemoryLM,
    *,
    segment_len: int | None = None,
    mem_len: int | None = None,
    c_mem_len: int | None = None,
) -> MemoryLM:
    """The model, from now on reading in other segments or remembering more or less than in training.

    Raises ValueError for lengths that can't be, and for more positions than learned ones are stored.
    """
    old = model.config
    config = replace(
        old,
        segment_len=old.segment_len if segment_len is None else segment_len,
        mem_len=old.mem_len if mem_len is None else mem_len,
        c_mem_len=old.c_mem_len if c_mem_len is None else c_mem_len,
    )
    attention = model.transformer.memory_layers[0].self_attn
    if attention.positions == "learned" and config.longest_attention > attention.max_positions:
        raise UserError(
            f"attention over {config.longest_attention} positions was asked for, but the model learned "
            f"{attention.max_positions}; shorten segment or memory, or train with positions='sinusoidal'."
        )
    model.config = config
    return model
