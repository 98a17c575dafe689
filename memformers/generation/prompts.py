"""Prompts of several lengths in one batch, in which each stream is read exactly as it would be alone.

What a position sees depends on where its segment begins, and with compression also on where slots are cut. So
the padding on the left is a multiple of both lengths: each prompt begins at the start of a segment and at the
edge of a slot, as it would alone. The prompts then end at most one such multiple apart. In this last part,
the streams whose prompts have ended already generate, while the others still read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.models.config import ModelConfig


@dataclass(frozen=True)
class Prompts:
    """The prompts of B streams in one text of T tokens."""

    tokens: Tensor
    """``[T, B]``, with zeros before a prompt and after it."""
    doc_starts: Tensor | None
    """Boolean ``[T, B]``, true where a prompt begins after padding; None where none does."""
    ends: tuple[int, ...]
    """The end of each prompt: the number of tokens before it, including its padding."""

    @property
    def together(self) -> int:
        """How many tokens all streams read before the first of them generates."""
        return min(self.ends)


def side_by_side(prompts: Sequence[Tensor], config: ModelConfig) -> Prompts:
    """Prompts ``[P_i]``, int64 or int32 with P_i ≥ 1, for a model of this ``config``. Raises UserError for an
    empty sequence, and for a prompt that is not such a tensor or has no tokens."""
    check_prompts(prompts)
    step = math.lcm(config.segment_len, *(own.compression_rate for own in config.layer_lengths))
    longest = max(map(len, prompts))
    begins = [(longest - len(prompt)) // step * step for prompt in prompts]
    ends = tuple(begin + len(prompt) for begin, prompt in zip(begins, prompts, strict=True))
    tokens = prompts[0].new_zeros(max(ends), len(prompts), dtype=torch.int64)
    doc_starts = torch.zeros_like(tokens, dtype=torch.bool)
    for stream, (prompt, begin, end) in enumerate(zip(prompts, begins, ends, strict=True)):
        tokens[begin:end, stream] = prompt
        doc_starts[begin, stream] = begin > 0
    return Prompts(tokens, doc_starts if any(begins) else None, ends)


def check_prompts(prompts: Sequence[Tensor]) -> None:
    """Raise UserError, which names the prompt, for one that is not a tensor of integers ``[P]`` with P ≥
    1."""
    if not prompts:
        raise UserError("there are no prompts; give at least one, as a tensor of its tokens.")
    for i, prompt in enumerate(prompts):
        which = f"prompt {i} of {len(prompts)} (counted from 0)"
        if not isinstance(prompt, Tensor):
            raise UserError(f"{which} is a {type(prompt).__name__}; give a tensor of its tokens.")
        if prompt.shape == (0,):
            raise UserError(f"{which} has no tokens; give it at least one, such as a line break.")
        if prompt.dim() != 1 or prompt.dtype not in (torch.int64, torch.int32):
            raise UserError(
                f"{which} was expected as int64 or int32 integers [tokens]; {prompt.dtype} "
                f"{list(prompt.shape)} came. Give one dimension, or all prompts as one tensor."
            )
