import pytest
import torch

from memformers import FeedForward, RelativeMultiHeadAttention, TransformerXLLayer
from memformers.layers import stack
from tests.builders import small_xl


def test_feed_forward_is_two_linear_maps_around_a_relu():
    ffn = FeedForward(4, 6, 0.0)
    x = torch.randn(3, 2, 4)
    hidden = (x @ ffn.layer1.weight.T + ffn.layer1.bias).clamp(min=0)
    torch.testing.assert_close(ffn(x), hidden @ ffn.layer2.weight.T + ffn.layer2.bias)


def test_dropout_acts_in_training_only():
    layer = TransformerXLLayer(
        d_model=8,
        self_attn=RelativeMultiHeadAttention(2, 8, 0.5),
        feed_forward=FeedForward(8, 16, 0.5),
        dropout_prob=0.5,
    )
    x = torch.randn(5, 2, 8)
    assert not torch.equal(layer(x=x, mem=None), layer(x=x, mem=None))
    layer.eval()
    assert torch.equal(layer(x=x, mem=None), layer(x=x, mem=None))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mem", [None, torch.randn(3, 2, 12), torch.randn(20, 2, 12)])
def test_a_post_norm_layer_normalizes_sums_and_attends_to_what_memory_holds(mem):
    layer = small_xl(norm="post").layers[0].double()
    mem = mem if mem is None else mem.double()
    x = torch.randn(2, 2, 12)
    context = x if mem is None else torch.cat((mem, x))
    y = layer.norm_self_attn(x + layer.self_attn(query=x, key=context, value=context))
    wanted = layer.norm_ff(y + layer.feed_forward(y))
    torch.testing.assert_close(layer(x=x, mem=mem), wanted, rtol=0, atol=1e-12)


def test_after_post_norm_layers_comes_no_other_norm():
    model = small_xl(norm="post")
    x = torch.randn(5, 2, 12)
    output, inputs = model(x, None)
    torch.testing.assert_close(output, model.layers[1](x=inputs[1], mem=None))
    assert not [name for name in model.state_dict() if name.startswith("norm.")]


def test_another_place_of_the_norm_is_an_error():
    with pytest.raises(ValueError, match="norm='between' is unknown; use 'pre' or 'post'"):
        small_xl(norm="between")


def test_layers_of_a_stack_start_from_different_weights():
    layers = small_xl(n_layers=3).layers
    first, second, third = (layer.feed_forward.layer1.weight for layer in layers)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_a_stack_of_no_layers_is_an_error():
    with pytest.raises(ValueError, match="n_layers=0"):
        stack(small_xl().layers[0], 0)


def test_a_layer_and_its_attention_must_have_one_width():
    with pytest.raises(ValueError, match="d_model=16, but self_attn was built for 8"):
        TransformerXLLayer(
            d_model=16,
            self_attn=RelativeMultiHeadAttention(2, 8),
            feed_forward=FeedForward(16, 16),
            dropout_prob=0.0,
        )
