"""torch.compile takes whole models, in one graph, and changes nothing that they compute."""

from itertools import product

import pytest
import torch

from memformers.kernels import dispatch
from tests.builders import MODELS, small_lm

NEVER = 1 << 18
"""So much work is never met here, so that the blocked kernel isn't."""


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
@pytest.mark.parametrize(
    ("model", "worth_blocking", "n_layers"),
    [
        ("transformer", 1, 1),
        ("transformer-xl", NEVER, 1),
        ("compressive", 1, 1),
        *(pytest.param(*case, 2, marks=pytest.mark.long) for case in product(MODELS, (1, NEVER))),
    ],
)
def test_a_compiled_model_is_one_graph_with_the_same_results(model, worth_blocking, n_layers, monkeypatch):
    monkeypatch.setattr(dispatch, "WORTH_BLOCKING", worth_blocking)
    torch.compiler.reset()
    lm = small_lm(model, n_layers=n_layers)
    compiled = torch.compile(lm, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(three_segments(lm, compiled), three_segments(lm, lm), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
