"""Ours against labml-nn 0.5.1, from the same weights, in double precision."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from experiments.benchmarks.peers import LabmlLM, cross_entropy, two_alike, two_gradients
from experiments.benchmarks.training import MODELS
from memformers import from_labml
from tests.builders import SMALL, fill_zeros
from tests.texts import same

S = 5
B = 3
CONFIG = replace(SMALL, segment_len=S, mem_len=8, positions="learned")


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("model", MODELS)
def test_a_model_agrees_over_four_segments(model):
    config = replace(CONFIG, model=model)
    ours, theirs = two_alike(config)
    fill_zeros(theirs)
    positions = {"max_positions": config.longest_attention}
    ours.load_state_dict(from_labml(theirs.state_dict(), **positions))
    ours.transformer.load_state_dict(from_labml(theirs.transformer.state_dict(), **positions))
    our_memory = None
    their_memory = None
    our_loss = 0.0
    their_loss = 0.0
    n_compressions = 0
    for _ in range(4):
        tokens, targets = torch.randint(config.vocab_size, (2, S, B))
        logits, our_memory, reconstruction = ours(tokens, our_memory)
        their_logits, their_memory, their_reconstruction = theirs(tokens, their_memory)
        mem = [layer.mem for layer in our_memory.layers]
        c_mem = [layer.slots for layer in our_memory.layers if layer.n_slots]
        same([logits, mem, c_mem, reconstruction], [their_logits, *their_memory, their_reconstruction])
        n_compressions += bool(reconstruction > 0)
        our_loss += reconstruction + cross_entropy(logits, targets)
        their_loss += their_reconstruction + cross_entropy(their_logits, targets)
    assert n_compressions == (3 if model == "compressive" else 0)
    our_loss.backward()
    their_loss.backward()
    same(*two_gradients(ours, theirs))
    assert all(parameter.grad.any() for parameter in ours.parameters())


def test_another_models_state_dict_is_an_error():
    with pytest.raises(ValueError, match=r"expected .* labml-nn's TransformerXL .* weight, bias"):
        from_labml(nn.Linear(2, 2).state_dict())


def test_too_many_positions_are_an_error():
    with pytest.raises(ValueError, match="max_positions=5000"):
        from_labml(LabmlLM(CONFIG).state_dict(), max_positions=5000)
