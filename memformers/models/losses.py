"""The loss of a language model: the cross-entropy of each token's successor."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class TokenLosses(NamedTuple):
    loss: Tensor
    """Mean cross-entropy, a scalar in nats per token, to train with."""
    losses: Tensor | None = None
    """``[S, B]``: the cross-entropy of each token, without gradient; 0 if there is no target. None while the
    model is in training mode, which needs only their mean."""
    correct: Tensor | None = None
    """bool ``[S, B]``: whether the target was the most likely token; None in training mode."""


def token_losses(logits: Tensor, targets: Tensor, *, by_token: bool = True) -> TokenLosses:
    """The loss of ``logits [S, B, vocab_size]`` for ``targets [S, B]``, and if ``by_token`` each token's."""
    # What F.cross_entropy computes, in two steps, so that a mean and the losses share a normalization.
    log_probs = F.log_softmax(upcast(logits).flatten(0, 1), dim=-1)  # [S·B, vocab_size]
    flat_targets = targets.flatten()  # [S·B]
    loss = F.nll_loss(log_probs, flat_targets)
    if not by_token:
        return TokenLosses(loss)
    losses = F.nll_loss(log_probs.detach(), flat_targets, reduction="none")
    is_correct = logits.detach().argmax(-1) == targets  # [S, B]
    return TokenLosses(loss, losses.view_as(targets), is_correct)


def upcast(logits: Tensor) -> Tensor:
    """Logits ``[·]``, in float32 if they are in half precision, in which losses would be rounded."""
    return logits.float() if logits.element_size() < 4 else logits
