"""The layers of a stack, what they remember, and how they know distances."""

import math

import pytest
import torch

from memformers import TransformerXL, TransformerXLLayer
from memformers.models.positions import Sinusoids, sinusoids
from tests.builders import layer_parts, small_lm, small_xl


def test_dropout_acts_in_training_only():
    layer, x = small_lm("transformer-xl", dropout=0.5).transformer.layers[0], torch.randn(5, 2, 12)
    assert not torch.equal(layer(x=x), layer(x=x))
    layer.eval()
    assert torch.equal(layer(x=x), layer(x=x))


def test_layers_of_a_stack_start_from_different_weights():
    layers = small_xl(n_layers=3).layers
    first, second, third = (layer.feed_forward.layer1.weight for layer in layers)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


@pytest.mark.parametrize(
    ("build", "message"),
    [(lambda: small_xl(norm="between"), "norm='between'"),
     (lambda: TransformerXL(small_xl().layers[0], 0), "n_layers=0"),
     (lambda: TransformerXLLayer(**(layer_parts() | {"d_model": 16})),
      "d_model=16, but self_attn was built for 12")],
)  # fmt: skip
def test_layers_that_cannot_be_are_an_error(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_sinusoids_are_the_papers():
    features = sinusoids(6, 8)
    for d in range(6):
        for i in range(4):
            angle = d / 10_000 ** (2 * i / 8)
            assert features[d, i].item() == pytest.approx(math.sin(angle), abs=1e-15)
            assert features[d, 4 + i].item() == pytest.approx(math.cos(angle), abs=1e-15)


def test_the_table_holds_the_papers_sinusoids_of_any_dtype_though_it_grew_and_was_cast():
    table = Sinusoids(8)
    for distances, dtype in ((3, torch.float32), (7, torch.float32), (5, torch.float64), (9, torch.float64)):
        table.to(dtype)
        found = table(distances, torch.empty(0, dtype=dtype))
        assert torch.equal(found, sinusoids(distances, 8).to(dtype))


def test_the_table_is_computed_once_and_shared_by_all_layers():
    lm = small_lm("transformer-xl")
    lm(torch.zeros(7, 1, dtype=torch.long))
    tables = {layer.self_attn.sinusoids.table.data_ptr() for layer in lm.transformer.layers}
    lm(torch.zeros(7, 1, dtype=torch.long))
    assert len(tables) == 1
    assert tables == {layer.self_attn.sinusoids.table.data_ptr() for layer in lm.transformer.layers}
    assert not [name for name in lm.state_dict() if "table" in name]


def test_a_table_made_in_inference_mode_does_not_stop_a_training():
    lm, tokens = small_lm("transformer-xl"), torch.zeros(7, 1, dtype=torch.long)
    with torch.inference_mode():
        lm(tokens)
    lm(tokens).logits.sum().backward()


def test_new_memories_are_the_detached_inputs_of_each_layer():
    model = small_xl()
    x = torch.randn(5, 2, 12, requires_grad=True)
    _, new_mem = model(x, None)
    assert len(new_mem) == 2
    torch.testing.assert_close(new_mem[0], x.detach())
    torch.testing.assert_close(new_mem[1], model.layers[0](x=x, mem=None).detach())
    assert not any(mem.requires_grad for mem in new_mem)


@pytest.mark.parametrize("mem", [None, [], [torch.zeros(0, 2, 12)] * 2])
def test_no_memory_can_be_said_in_three_ways(mem):
    model = small_xl()
    x = torch.randn(5, 2, 12)
    torch.testing.assert_close(model(x, mem)[0], model(x, None)[0])


@pytest.mark.parametrize(
    ("mem", "message"),
    [([torch.zeros(3, 2, 12)], "2 layers.* got 1"),
     ([torch.zeros(3, 4, 12)] * 2, r"batch.*\[·, 2, 12\], got \[3, 4, 12\]"),
     ([torch.zeros(3, 2, 8)] * 2, r"got \[3, 2, 8\]"),
     ([torch.zeros(3, 2, 12, dtype=torch.float64)] * 2, "float32 on cpu, .* got torch.float64"),
     ([torch.zeros(3, 2, 12, device="meta")] * 2, "on cpu, .* on meta")],
)  # fmt: skip
def test_a_memory_that_does_not_fit_is_an_error(mem, message):
    with pytest.raises(ValueError, match=message):
        small_xl()(torch.randn(5, 2, 12), mem)
