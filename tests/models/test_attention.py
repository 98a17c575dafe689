import math

import pytest
import torch

from memformers import RelativeMultiHeadAttention
from memformers.kernels import absorbed
from memformers.kernels.naive import causal_mask
from memformers.models.attention import check_mask
from memformers.models.positions import sinusoids
from tests.builders import fill_zeros
from tests.kernels.against_naive import first_keys

SCHEMES = ["learned", "sinusoidal"]
SINUSOIDAL = {"heads": 2, "d_model": 8, "positions": "sinusoidal"}


@pytest.mark.parametrize("positions", SCHEMES)
def test_no_mask_means_causal_with_all_memory_visible(positions):
    attention = fill_zeros(RelativeMultiHeadAttention(3, 12, 0.0, positions=positions))
    x = torch.randn(7, 2, 12)
    mask = causal_mask(3, 7, x.device)[:, :, None]
    implicit = attention(query=x[-3:], key=x, value=x)
    torch.testing.assert_close(implicit, attention(query=x[-3:], key=x, value=x, mask=mask))
    changed = x.clone()
    changed[-1] += 1.0  # the last query's own key: no one before may notice
    torch.testing.assert_close(attention(query=x[-3:], key=changed, value=changed)[:-1], implicit[:-1])


@pytest.mark.parametrize("positions", SCHEMES)
def test_a_mask_per_stream_acts_on_that_stream_alone(positions):
    attention = fill_zeros(RelativeMultiHeadAttention(2, 8, 0.0, positions=positions))
    x = torch.randn(5, 3, 8)
    mask = causal_mask(5, 5, x.device)[:, :, None].repeat(1, 1, 3)
    mask[3, 0, 1] = False
    plain, masked = attention(query=x, key=x, value=x), attention(query=x, key=x, value=x, mask=mask)
    different = (plain - masked).abs().amax(-1) > 1e-7
    assert different.nonzero().tolist() == [[3, 1]]


def test_sinusoids_are_the_papers():
    features = sinusoids(6, 8)
    for d in range(6):
        for i in range(4):
            angle = d / 10_000 ** (2 * i / 8)
            assert features[d, i].item() == pytest.approx(math.sin(angle), abs=1e-15)
            assert features[d, 4 + i].item() == pytest.approx(math.cos(angle), abs=1e-15)


def test_distances_beyond_clamp_len_look_alike():
    assert torch.equal(sinusoids(6, 8, clamp_len=3), sinusoids(4, 8)[[0, 1, 2, 3, 3, 3]])
    assert torch.equal(sinusoids(3, 8, clamp_len=3), sinusoids(3, 8))


def test_more_keys_than_learned_positions_is_an_error_with_both_numbers():
    attention = RelativeMultiHeadAttention(2, 8, max_positions=6)
    x = torch.randn(9, 1, 8)
    with pytest.raises(ValueError, match=r"max_positions=6.*got 9.*sinusoidal"):
        attention(query=x[-3:], key=x, value=x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 8, "d_model": 100}, r"d_model=100 is not divisible by heads=8; .* 96 or 104"),
        ({"heads": 8, "d_model": 4}, r"multiple of 8, such as 8"),
        ({"heads": 0, "d_model": 8}, "heads=0"),
        ({"heads": 2, "d_model": 8, "dropout_prob": 1.0}, "dropout_prob=1.0"),
        ({"heads": 2, "d_model": 8, "positions": "rotary"}, "positions='rotary'"),
        ({"heads": 2, "d_model": 8, "max_positions": 0}, "max_positions=0"),
        ({"heads": 2, "d_model": 8, "clamp_len": 5, "positions": "learned"}, "clamp_len=5 is for sinusoids"),
        (SINUSOIDAL | {"clamp_len": 0}, "clamp_len=0"),
        (SINUSOIDAL | {"position_features": -1}, "position_features=-1 can.t represent distances"),
        (
            SINUSOIDAL | {"position_features": 4, "positions": "learned"},
            "position_features=4 is for sinusoids",
        ),
    ],
)
def test_a_config_that_cannot_work_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        RelativeMultiHeadAttention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.float(), "boolean mask"),
        (lambda m: m[:, :-1], r"\[3, 7, 2\] or \[3, 7, 1\]"),
        (lambda m: m | True, "query 0 of stream 0 see key 5, which lies in its future"),
        (lambda m: m & False, "hides every key from query 0 of stream 0"),
    ],
)
def test_a_mask_that_cannot_work_is_an_error(change, message):
    attention = RelativeMultiHeadAttention(2, 8)
    x = torch.randn(7, 2, 8)
    mask = change(causal_mask(3, 7, x.device)[:, :, None])
    with pytest.raises(ValueError, match=message):
        attention(query=x[-3:], key=x, value=x, mask=mask)


@pytest.mark.parametrize("change", [lambda f: f[:, :-1], lambda f: f.int(), lambda f: f[0]])
def test_first_keys_of_another_shape_or_dtype_are_an_error(change):
    x, key_start = torch.randn(7, 2, 8), change(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"key_start as int64 \[2, 3\]"):
        RelativeMultiHeadAttention(2, 8)(query=x[-3:], key=x, value=x, key_start=key_start)


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((3, 2, 6), (7, 2, 6), (7, 2, 6)),
        ((3, 2, 8), (7, 4, 8), (7, 4, 8)),
        ((3, 2, 8), (7, 2, 8), (6, 2, 8)),
        ((3, 8), (7, 8), (7, 8)),
    ],
)
def test_shapes_that_do_not_fit_are_an_error(query, key, value):
    with pytest.raises(ValueError, match=r"query \[S, B, 8\] and key, value \[K, B, 8\]"):
        RelativeMultiHeadAttention(2, 8)(
            query=torch.zeros(query), key=torch.zeros(key), value=torch.zeros(value)
        )


def over_memory_and_plainly(attention, S, M, mask=None, key_start=None):
    """The same attention over a memory twice: as layers ask for it, and as defined; with gradients."""
    norm = torch.nn.LayerNorm(12)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x, past = torch.randn(S, 2, 12, requires_grad=True), torch.randn(M, 2, 12)
    context = norm(torch.cat((past, x)))
    plain = attention(query=norm(x), key=context, value=context, mask=mask, key_start=key_start)
    learning = [x, *attention.parameters(), *norm.parameters()]
    weight = torch.randn_like(plain)
    results = []
    for output in (attention.over_memory(x, past, norm, mask, key_start), plain):
        results.append([output, *torch.autograd.grad(output, learning, weight)])
    return results


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("positions", SCHEMES)
@pytest.mark.parametrize(("S", "M"), [(3, 4), (1, 1), (2, 7), (1, 9), (2, 8)])
@pytest.mark.parametrize("kernel", ["auto", "naive", "blocked"])
@pytest.mark.parametrize("bounded", [False, True])
def test_attention_over_a_memory_is_attention_over_memory_and_segment(positions, S, M, kernel, bounded):
    attention = RelativeMultiHeadAttention(
        3, 12, 0.0, positions=positions, max_positions=M + S, kernel=kernel
    )
    key_start = first_keys(2, S, M + S) if bounded else None
    for got, wanted in zip(
        *over_memory_and_plainly(fill_zeros(attention), S, M, key_start=key_start), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


@pytest.mark.usefixtures("float64")
def test_attention_over_a_memory_obeys_a_mask():
    mask = causal_mask(2, 10, torch.device("cpu"))[:, :, None].clone()
    mask[0, 3] = False
    attention = fill_zeros(RelativeMultiHeadAttention(3, 12, 0.0, max_positions=10))
    for got, wanted in zip(*over_memory_and_plainly(attention, 2, 8, mask), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


def test_short_segments_over_long_memories_need_no_keys(monkeypatch):
    calls = []
    real = absorbed.relative_attention
    monkeypatch.setattr(absorbed, "relative_attention", lambda *a, **k: (calls.append(1), real(*a, **k))[1])
    attention = RelativeMultiHeadAttention(3, 12, 0.5)
    asked = [(attention.eval(), 2, 8), (attention, 3, 8), (attention, 2, 7)]
    absorbs = []
    for module, S, M in asked:
        calls.clear()
        over_memory_and_plainly(module, S, M)
        absorbs.append(bool(calls))
    assert absorbs == [True, False, False]
    calls.clear()
    attention.train().over_memory(torch.randn(2, 2, 12), torch.randn(8, 2, 12), torch.nn.LayerNorm(12))
    assert not calls, "it can't drop probabilities"


def test_a_mask_off_the_cpu_is_not_waited_for_and_its_future_is_hidden():
    """A meta tensor has no values to read, as those of a GPU are not there yet."""
    assert check_mask(torch.ones(3, 7, 1, dtype=torch.bool, device="meta"), 3, 7, 2).is_meta
    with pytest.raises(ValueError, match=r"\[3, 7, 2\] or \[3, 7, 1\]"):
        check_mask(torch.ones(3, 6, 1, dtype=torch.bool, device="meta"), 3, 7, 2)
