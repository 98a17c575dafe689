"""torch.compile takes whole models, in one graph, and changes nothing that they compute."""

import pytest
import torch

from memformers.kernels import dispatch
from tests.builders import MODELS, small_lm


def three_segments(model, forward):
    """Logits, memory and gradients of three segments, the memory growing and then full."""
    text = torch.randint(11, (21, 2), generator=torch.Generator().manual_seed(0))
    memory, results = None, []
    for segment in text.split(7):
        output = forward(segment, memory)
        memory = output.memory
        loss = output.logits.square().mean() + output.auxiliary_loss
        learning = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, learning, allow_unused=True)
        results += [output.logits, *memory.mem, *memory.c_mem, *(g for g in grads if g is not None)]
    return results


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("worth_blocking", [1, 1 << 18])
def test_a_compiled_model_is_one_graph_with_the_same_results(model, worth_blocking, monkeypatch):
    monkeypatch.setattr(dispatch, "WORTH_BLOCKING", worth_blocking)
    torch.compiler.reset()
    lm = small_lm(model)
    compiled = torch.compile(lm, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(three_segments(lm, compiled), three_segments(lm, lm), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
