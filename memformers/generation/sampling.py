"""Drawing the next token from logits: greedy, or by temperature, top-k and top-p."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from memformers.common.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How to draw a token; checked when made, ValueError says what doesn't fit."""

    temperature: float = 1.0
    """Divides the logits: below 1 safer, above 1 wilder; 0 takes the likeliest (greedy)."""
    top_k: int | None = None
    """Draw among the k likeliest only."""
    top_p: float | None = None
    """Draw among the likeliest that together reach this probability (nucleus sampling, Holtzman et
    al. 2020, arXiv 1904.09751)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature} is not 0 (greedy) or above.")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} leaves nothing to draw from; use at least 1.")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p={self.top_p} is outside (0, 1]; use 1 for all tokens.")

    def draw(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One token for each row of ``logits [B, vocab]``: int64 ``[B]``."""
        if logits.isnan().any():
            raise UserError("the model's logits are NaN, so nothing can be drawn; are its weights finite?")
        if self.temperature == 0.0:
            return logits.argmax(-1)
        # Shifted to at most 0, so that a small temperature gives -inf and never inf − inf.
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            kept = torch.zeros_like(logits, dtype=torch.bool).scatter(
                -1, logits.topk(self.top_k).indices, True
            )
            logits = logits.masked_fill(~kept, -math.inf)
        if self.top_p is not None:
            logits = keep_nucleus(logits, self.top_p)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def keep_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """``logits [B, vocab]`` with −∞ wherever likelier tokens together already reach ``top_p``."""
    descending, order = logits.sort(stable=True, dim=-1, descending=True)
    probabilities = descending.softmax(-1)
    likelier = probabilities.cumsum(-1) - probabilities  # of all before it, itself not counted
    outside = (likelier >= top_p).scatter(-1, order, likelier >= top_p)
    return logits.masked_fill(outside, -math.inf)


def seeded(seed: int | None, device: torch.device) -> torch.Generator:
    """A generator of random numbers: from ``seed``, or of other ones each time."""
    generator = torch.Generator(device)
    generator.seed() if seed is None else generator.manual_seed(seed)
    return generator
