import pytest
import torch
import torch.nn.functional as F

from memformers.models.scores import token_losses
from tests.builders import MODELS, small_lm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_loss_of_logits_and_its_gradient_are_those_of_cross_entropy_to_the_bit(dtype):
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


@pytest.mark.parametrize("model", MODELS)
def test_a_model_with_targets_gives_the_losses_of_its_logits_and_the_same_memory(model):
    lm = small_lm(model)
    tokens, targets = torch.randint(0, 11, (2, 7, 3))
    output = lm(tokens, lm(tokens).memory)
    scores, memory, auxiliary_loss = lm(tokens, lm(tokens).memory, targets)
    assert torch.equal(scores.loss, F.cross_entropy(output.logits.flatten(0, 1), targets.flatten()))
    assert all(map(torch.equal, memory.mem + memory.c_mem, output.memory.mem + output.memory.c_mem))
    assert torch.equal(auxiliary_loss, output.auxiliary_loss)
