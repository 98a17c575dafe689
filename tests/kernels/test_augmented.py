"""Sinusoidal positions as a plain dot product, against the naive kernel."""

import pytest
import torch

from memformers import MemoryLM, RelativeMultiHeadAttention
from memformers.attention import sinusoids
from memformers.kernels import augmented, naive
from memformers.kernels.dispatch import relative_attention
from tests.builders import fill_zeros, small_lm
from tests.kernels.against_naive import compare_outputs


@pytest.mark.parametrize(
    "size",
    [(2, 3, 5, 11, 7, 4), (3, 2, 7, 7, 5, 2), (5, 3, 1, 13, 2, 6), (1, 1, 1, 1, 1, 2), (2, 2, 67, 139, 5, 8)],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_augmented_equals_naive_in_output_and_every_gradient(size, dtype):
    B, H, S, K, E, P = size
    shapes = {"query": (B, H, S, E), "key": (B, H, K, E), "value": (B, H, K, E), "w_r": (H, E, P)}
    shapes |= {"u": (H, E), "v": (H, E)}
    exact = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    inputs = {name: t.to(dtype).requires_grad_() for name, t in exact.items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
    table = sinusoids(K, P)
    r = torch.einsum("hep,kp->hke", exact["w_r"], table)
    given = {name: exact[name] for name in ("query", "key", "value", "u", "v")}
    wanted = naive.relative_attention(**given, r=r)
    got = augmented.relative_attention(**inputs, sinusoids=table.to(dtype))
    compare_outputs(got, wanted, inputs, exact, dtype)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("features", [None, 4])
def test_a_module_gives_the_same_attention_and_gradients(features):
    x, results = torch.randn(11, 3, 8), []
    for kernel in ("naive", "augmented"):
        torch.manual_seed(1)
        module = fill_zeros(
            RelativeMultiHeadAttention(
                2, 8, 0.0, positions="sinusoidal", position_features=features, kernel=kernel
            )
        )
        output = module(query=x[-5:], key=x, value=x)
        output.square().sum().backward()
        results.append([output, *(p.grad for p in module.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("model", ["transformer", "transformer-xl", "compressive"])
def test_whole_models_agree_and_generate_alike(model):
    options = {"positions": "sinusoidal", "position_features": 4}
    plain, fast = (small_lm(model, kernel=kernel, **options) for kernel in ("naive", "augmented"))
    fast.load_state_dict(plain.state_dict())
    text, memory, other = torch.randint(11, (21, 2)), None, None
    for segment in text.split(7):
        a, b = plain(segment, memory), fast(segment, other)
        torch.testing.assert_close(a.logits, b.logits, rtol=0, atol=1e-11)
        memory, other = a.memory, b.memory
    texts = [list(lm.generate(text[:9], 10, temperature=0.0)) for lm in (plain, fast)]
    assert all(torch.equal(a, b) for a, b in zip(*texts, strict=True))


def test_dropout_of_probabilities_works():
    module = RelativeMultiHeadAttention(2, 8, 0.5, positions="sinusoidal", kernel="augmented")
    x = torch.randn(11, 3, 8)
    assert not torch.equal(module(query=x, key=x, value=x), module(query=x, key=x, value=x))


def test_fewer_position_features_are_fewer_weights():
    few, many = (small_lm("transformer-xl", positions="sinusoidal", position_features=p) for p in (4, None))
    sizes = [sum(p.numel() for p in lm.parameters()) for lm in (few, many)]
    assert sizes[1] - sizes[0] == 2 * 12 * (12 - 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "learned", "kernel": "augmented"}, "kernel='augmented' splits sines and cosines"),
        ({"position_features": 3, "kernel": "augmented"}, "position_features=3 is odd"),
        ({"position_features": -1}, "position_features=-1 tells no distances apart"),
    ],
)
def test_what_cannot_be_split_is_an_error(options, message):
    options = {"positions": "sinusoidal"} | options
    with pytest.raises(ValueError, match=message):
        RelativeMultiHeadAttention(2, 8, 0.0, **options)
    with pytest.raises(ValueError, match=message):
        MemoryLM(small_lm("transformer-xl").config.__class__(**options))


def test_a_mask_and_a_table_of_distances_are_refused():
    module = RelativeMultiHeadAttention(2, 8, 0.0, positions="sinusoidal", kernel="augmented")
    x = torch.randn(5, 1, 8)
    with pytest.raises(ValueError, match="kernel='augmented' is causal and takes no explicit mask"):
        module(query=x, key=x, value=x, mask=naive.causal_mask(5, 5, x.device)[:, :, None])
    q = torch.randn(1, 1, 2, 3)
    with pytest.raises(ValueError, match="kernel='augmented' takes sinusoids, not r"):
        relative_attention(q, q, q, torch.randn(1, 2, 3), u=torch.randn(1, 3), kernel="augmented")
