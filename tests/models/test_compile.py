"""torch.compile takes whole models, in one graph, and changes nothing that they compute."""

from itertools import product

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from memformers import AdaptiveConfig
from memformers.kernels import dispatch
from memformers.models.memory import Memory
from tests.builders import MODELS, small_lm
from tests.texts import BY_LAYER

NEVER = 1 << 18
"""So much work is never met here, so that the blocked kernel isn't."""
CLUSTERS = {"n_layers": 1, "vocab_size": 41, "embedding": "adaptive", "norm": "post",
            "adaptive": AdaptiveConfig((5, 20), 2, None, True, True)}  # fmt: skip
LONGER = ("transformer-xl", NEVER, False, {"mem_len": (5, 8)})


def three_segments(model, forward, bounded):
    """Losses, memory and gradients of three segments, the memory growing and then full; or where documents
    begin, after an empty memory of full length."""
    generator, S = torch.Generator().manual_seed(0), model.config.segment_len
    text = torch.randint(model.config.vocab_size, (3 * S, 2), generator=generator)
    doc_starts = (torch.rand(3 * S, 2, generator=generator) < 0.2).split(S) if bounded else [None] * 3
    memory, results = Memory.empty(model.config, 2) if bounded else None, []
    for segment, of_segment in zip(text.split(S), doc_starts, strict=True):
        output = forward(segment, memory, segment.flip(0), doc_starts=of_segment)
        memory = output.memory
        loss = output.scores.loss + output.auxiliary_loss
        learning = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, learning, allow_unused=True)
        results += [output.scores.losses, *memory.mem, *memory.c_mem, *(g for g in grads if g is not None)]
    return results


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("model", "worth_blocking", "bounded", "settings"),
    [
        ("transformer-xl", NEVER, False, CLUSTERS),
        ("compressive", 1, True, BY_LAYER),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (*product(MODELS, (1, NEVER), (False, True), ({},)), LONGER)
        ),
    ],
)
def test_a_compiled_model_is_one_graph_with_the_same_results(
    model, worth_blocking, bounded, settings, monkeypatch
):
    """And the same graph for every segment where the memory has its length from the beginning."""
    monkeypatch.setattr(dispatch, "WORTH_BLOCKING", worth_blocking)
    torch.compiler.reset()
    lm = small_lm(model, **settings, **({"segment_len": 6} if bounded else {}))
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lm, fullgraph=True, backend=backend)
    wanted = three_segments(lm, lm, bounded)
    for a, b in zip(three_segments(lm, compiled, bounded), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    assert backend.frame_count == 1 or not bounded
