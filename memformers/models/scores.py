"""How well the tokens of a segment were predicted.

A target of −100 means no target, as in PyTorch's own losses: it doesn't count in the mean.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.common.errors import UserError


class TokenLosses(NamedTuple):
    """Losses of the predictions of a segment, with targets ``[S, B]``."""

    loss: Tensor
    """Mean cross-entropy, a scalar in nats per token, to train with."""
    losses: Tensor
    """``[S, B]``: the cross-entropy of each token, without gradient; 0 if there is no target."""
    correct: Tensor
    """bool ``[S, B]``: whether the target was the most likely token."""


def token_losses(logits: Tensor, targets: Tensor) -> TokenLosses:
    """Of ``logits [S, B, vocab_size]`` for ``targets [S, B]``."""
    # What F.cross_entropy computes, in two steps, so that a mean and the losses share a normalization.
    log_probs, flat = F.log_softmax(upcast(logits).flatten(0, 1), dim=-1), targets.flatten()
    loss, losses = F.nll_loss(log_probs, flat), F.nll_loss(log_probs.detach(), flat, reduction="none")
    return TokenLosses(loss, losses.view_as(targets), logits.detach().argmax(-1) == targets)


def upcast(logits: Tensor) -> Tensor:
    """Logits, of any shape, in float32 where they are in half precision, so that losses are not rounded
    to it."""
    return logits.float() if logits.element_size() < 4 else logits


def check_targets(targets: Tensor, tokens: Tensor) -> None:
    """Raise UserError unless ``targets`` can be the next tokens of ``tokens [S, B]``."""
    if targets.shape != tokens.shape or targets.dtype != torch.int64 or targets.device != tokens.device:
        raise UserError(
            f"targets were expected as int64 {list(tokens.shape)} on {tokens.device}, the next token of "
            f"each; {targets.dtype} {list(targets.shape)} on {targets.device} came."
        )
