import pytest
import torch

from memformers import FeedForward, RelativeMultiHeadAttention, TransformerXL, TransformerXLLayer
from tests.builders import small_xl


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


def test_another_place_of_the_norm_is_an_error():
    with pytest.raises(ValueError, match="norm='between'"):
        small_xl(norm="between")


def test_layers_of_a_stack_start_from_different_weights():
    layers = small_xl(n_layers=3).layers
    first, second, third = (layer.feed_forward.layer1.weight for layer in layers)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_a_stack_of_no_layers_is_an_error():
    with pytest.raises(ValueError, match="n_layers=0"):
        TransformerXL(small_xl().layers[0], 0)


def test_a_layer_and_its_attention_must_have_one_width():
    with pytest.raises(ValueError, match="d_model=16, but self_attn was built for 8"):
        TransformerXLLayer(
            d_model=16,
            self_attn=RelativeMultiHeadAttention(2, 8),
            feed_forward=FeedForward(16, 16),
            dropout_prob=0.0,
        )
