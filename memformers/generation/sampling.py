"""Drawing the next token from logits: greedy, or by temperature, top-k and top-p."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count, Range, check_arguments


@dataclass(frozen=True)
class Sampling(Checked):
    """How to draw a token; ValueError for values that can't be used."""

    temperature: Annotated[float, Range(0, below=math.inf)] = 1.0
    """Divides the logits: below 1, likely tokens are drawn more often; above 1, unlikely ones; 0 takes the
    most likely token (greedy)."""
    top_k: Count | None = None
    """Draw only from the k most likely tokens."""
    top_p: Annotated[float, Range(above=0, most=1)] | None = None
    """Draw only from the most likely tokens that together reach this probability (nucleus sampling, Holtzman
    et al. 2020, arXiv 1904.09751)."""

    def draw(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One token for each row of ``logits [B, vocab]``: int64 ``[B]``."""
        highest = logits.amax(-1, keepdim=True)
        if not highest.isfinite().all():
            what = "NaN" if highest.isnan().any() else "infinite"
            raise UserError(
                f"the model's logits are {what}, so nothing can be drawn; check that its weights are finite."
            )
        if self.temperature == 0.0:
            return logits.argmax(-1)
        # Shifted to at most 0, so that a small temperature gives -inf and never inf − inf.
        numbers = torch.finfo(logits.dtype)  # a temperature beyond them would be 0 or infinite
        logits = (logits - highest) / min(max(self.temperature, numbers.tiny), numbers.max)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            kept = torch.zeros_like(logits, dtype=torch.bool).scatter(
                -1, logits.topk(self.top_k).indices, True
            )
            logits = logits.masked_fill(~kept, -math.inf)
        if self.top_p is not None:
            logits = keep_nucleus(logits, self.top_p)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def keep_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """``logits [B, vocab]`` with −∞ for every token whose more likely tokens together reach ``top_p``."""
    descending, order = logits.sort(stable=True, dim=-1, descending=True)
    probabilities = descending.softmax(-1)
    likelier = probabilities.cumsum(-1) - probabilities  # of all before it, itself not counted
    outside = likelier >= top_p
    outside[..., 0] = False  # also where top_p is too small for the dtype, and so 0
    return logits.masked_fill(outside.scatter(-1, order, outside), -math.inf)


@check_arguments
def seeded(
    seed: Annotated[int, Range(-(2**63), below=2**64)] | None, device: torch.device
) -> torch.Generator:
    """A generator of random numbers from ``seed``, or without one, of other numbers in each call. Raises
    UserError for a seed of more than 64 bits."""
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
