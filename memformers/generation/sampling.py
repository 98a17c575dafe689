"""Drawing the next token from logits: greedy, or by temperature, top-k and top-p."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Generator, Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count, Range, check_arguments


@dataclass(frozen=True)
class Sampling(Checked):
    """How to draw a token; ValueError for values that can't be used."""

    temperature: Annotated[float, Range(0, below=math.inf)] = 1.0
    """Divides the logits: likely tokens come more often below 1, less often above; 0 takes the likeliest."""
    top_k: Count | None = None
    """Draw only from the k most likely tokens."""
    top_p: Annotated[float, Range(above=0, most=1)] | None = None
    """Draw only from the likeliest that together reach this probability (nucleus, arXiv 1904.09751)."""

    def draw(self, logits: Tensor, generator: Generator | None = None) -> Tensor:
        """One token for each row of ``logits [B, vocab]``: int64 ``[B]``."""
        highest = logits.amax(-1, keepdim=True)
        if not highest.isfinite().all():
            what = "NaN" if highest.isnan().any() else "infinite"
            raise UserError(f"the model's logits are {what}; check that its weights are finite.")
        if self.temperature == 0.0:
            return logits.argmax(-1)
        # Shifted to at most 0, so that a small temperature gives -inf and never inf − inf.
        numbers = torch.finfo(logits.dtype)  # a temperature beyond them would be 0 or infinite
        logits = (logits - highest) / min(max(self.temperature, numbers.tiny), numbers.max)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            likeliest = logits.topk(self.top_k)
            logits = torch.full_like(logits, -math.inf).scatter(-1, likeliest.indices, likeliest.values)
        if self.top_p is not None:
            descending, order = logits.sort(stable=True, dim=-1, descending=True)
            probabilities = descending.softmax(-1)
            outside = probabilities.cumsum(-1) - probabilities >= self.top_p  # those before reach it already
            outside[..., 0] = False  # also where top_p is too small for the dtype, and so 0
            logits = logits.masked_fill(outside.scatter(-1, order, outside), -math.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


@check_arguments
def seeded(seed: Annotated[int, Range(-(2**63), below=2**64)] | None, device: torch.device) -> Generator:
    """A generator of random numbers from ``seed``, without one of others in each call. Raises UserError for a
    seed of more than 64 bits."""
    generator = Generator(device)
    return generator.manual_seed(generator.seed() if seed is None else seed)
