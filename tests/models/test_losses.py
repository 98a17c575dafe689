"""The loss of a language model."""

import pytest
import torch
import torch.nn.functional as F

from memformers.models.losses import token_losses


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_loss_and_its_gradient_are_cross_entropys_to_the_bit(dtype):
    logits = torch.randn(37, 5, 101, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 101, (37, 5))
    targets[3:5] = -100
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        scores = token_losses(logits, targets)
    assert torch.equal(scores.loss, wanted)
    grads = [torch.autograd.grad(loss, logits)[0] for loss in (scores.loss, wanted)]
    assert torch.equal(*grads)
    assert torch.equal(scores.losses[3:5], torch.zeros(2, 5, dtype=scores.losses.dtype))
    assert torch.equal(scores.correct, logits.argmax(-1) == targets)
