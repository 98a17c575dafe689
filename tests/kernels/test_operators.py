"""Derivatives beyond the backward pass: right, or an error that says what to do; the same at any size."""

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

from memformers.kernels import dispatch
from tests.builders import small_lm

pytestmark = pytest.mark.usefixtures("float64")

WITHIN = r"kernel='blocked' can't run within torch\.func .*; use kernel='auto' or 'naive'"
QUERY = "transformer.layers.0.self_attn.query.weight"


@pytest.fixture(params=["naive", "auto", "auto, as blocked", "blocked"])
def kernel(request, monkeypatch):
    """``auto`` also as it would be at sizes from which on it takes the blocked kernel."""
    if request.param == "auto, as blocked":
        monkeypatch.setattr(dispatch, "WORTH_BLOCKING", 1)
    return request.param.partition(",")[0]


def test_forward_mode_gives_the_directional_derivative(kernel):
    lm, tokens = small_lm("transformer-xl", kernel=kernel), torch.randint(11, (7, 2))
    memory = lm(tokens).memory
    weight = lm.get_parameter(QUERY).detach()
    direction = torch.randn_like(weight)

    def logits(weight):
        return functional_call(lm, {QUERY: weight}, (tokens, memory)).logits

    if kernel == "blocked":
        with pytest.raises(ValueError, match=WITHIN):
            jvp(logits, (weight,), (direction,))
        return
    _, derivative = jvp(logits, (weight,), (direction,))
    step = 1e-6 * direction
    wanted = (logits(weight + step) - logits(weight - step)).detach() / 2e-6
    assert wanted.norm() > 0
    torch.testing.assert_close(derivative.detach(), wanted, rtol=1e-6, atol=1e-8)


def test_the_second_derivative_is_right_or_an_error_that_names_naive(kernel):
    lm, x = small_lm("transformer-xl", kernel=kernel), torch.randn(7, 2, 12, requires_grad=True)
    attention = lm.transformer.layers[0].self_attn
    loss = attention(query=x, key=x, value=x).pow(2).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    if kernel == "blocked" or dispatch.WORTH_BLOCKING == 1:
        with pytest.raises(NotImplementedError, match="build the model with kernel='naive'"):
            first.pow(2).sum().backward()
        return
    assert torch.autograd.gradgradcheck(
        lambda x: attention(query=x, key=x, value=x).pow(2).sum(), x[:3, :1].detach().requires_grad_()
    )


def test_gradients_of_each_sample_are_those_of_one_after_the_other(kernel):
    lm, tokens = small_lm("transformer-xl", kernel=kernel), torch.randint(11, (7, 3))
    weights = {name: p.detach() for name, p in lm.named_parameters()}

    def loss(weights, stream):
        return functional_call(lm, weights, (stream[:, None],)).logits.square().mean()

    if kernel == "blocked":
        with pytest.raises(ValueError, match=WITHIN):
            vmap(grad(loss), in_dims=(None, 1))(weights, tokens)
        return
    together = vmap(grad(loss), in_dims=(None, 1))(weights, tokens)
    for i in range(3):
        for name, alone in grad(loss)(weights, tokens[:, i]).items():
            torch.testing.assert_close(together[name][i], alone, rtol=1e-9, atol=1e-12)
