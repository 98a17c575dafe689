from itertools import product

import pytest
import torch

from memformers import RelativeMultiHeadAttention
from memformers.kernels import absorbed
from memformers.kernels.naive import causal_mask
from memformers.models.attention import check_mask
from tests.builders import fill_zeros
from tests.kernels.against_naive import first_keys

SCHEMES = ["learned", "sinusoidal"]
SINUSOIDAL = {"heads": 2, "d_model": 8, "positions": "sinusoidal"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"heads": 8, "d_model": 100}, r"d_model=100 is not divisible by heads=8; .* 96 or 104"),
     ({"heads": 8, "d_model": 4}, r"multiple of 8, such as 8"),
     ({"heads": 0, "d_model": 8}, "heads=0"),
     ({"heads": 2, "d_model": 8, "dropout_prob": 1.0}, "dropout_prob=1.0"),
     ({"heads": 2, "d_model": 8, "positions": "rotary"}, "positions='rotary'"),
     ({"heads": 2, "d_model": 8, "max_positions": 0}, "max_positions=0"),
     ({"heads": 2, "d_model": 8, "clamp_len": 5, "positions": "learned"}, "clamp_len=5 is for sinusoids"),
     (SINUSOIDAL | {"clamp_len": 0}, "clamp_len=0"),
     (SINUSOIDAL | {"position_features": -1}, "position_features=-1"),
     ({"heads": 2, "d_model": 8, "position_features": 4}, "position_features=4 is for sinusoids")],
)  # fmt: skip
def test_a_config_that_cannot_work_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        RelativeMultiHeadAttention(**arguments)


MASK, FIRST = causal_mask(3, 7, torch.device("cpu"))[:, :, None], torch.zeros(2, 3, dtype=torch.int64)
IN_SHAPE, KEY_START = r"query \[S, B, 8\] and key, value \[K, B, 8\]", r"key_start as int64 \[2, 3\]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"mask": MASK.float()}, "boolean mask"),
     ({"mask": MASK[:, :-1]}, r"\[3, 7, 2\] or \[3, 7, 1\]"),
     ({"mask": MASK | True}, "query 0 of stream 0 see key 5, which lies in its future"),
     ({"mask": MASK & False}, "hides every key from query 0 of stream 0"),
     *(({"key_start": start}, KEY_START) for start in (FIRST[:, :-1], FIRST.int(), FIRST[0])),
     ({"query": torch.zeros(3, 2, 6), **dict.fromkeys(("key", "value"), torch.zeros(7, 2, 6))}, IN_SHAPE),
     (dict.fromkeys(("key", "value"), torch.zeros(7, 4, 8)), IN_SHAPE),
     ({"value": torch.zeros(6, 2, 8)}, IN_SHAPE),
     ({"query": torch.zeros(3, 8), **dict.fromkeys(("key", "value"), torch.zeros(7, 8))}, IN_SHAPE),
     (dict.fromkeys(("key", "value"), torch.zeros(9, 2, 8)), r"max_positions=8.*got 9.*sinusoidal")],
)  # fmt: skip
def test_what_attention_can_not_be_called_with_is_an_error(arguments, message):
    x = torch.randn(7, 2, 8)
    with pytest.raises(ValueError, match=message):
        RelativeMultiHeadAttention(2, 8, max_positions=8)(
            **({"query": x[-3:], "key": x, "value": x} | arguments)
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
    for output in (attention.forward_with_memory(x, past, norm, mask, key_start), plain):
        results.append([output, *torch.autograd.grad(output, learning, weight)])
    return results


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("positions", SCHEMES)
@pytest.mark.parametrize(("S", "M"), [(3, 4), (1, 1), (2, 7), (1, 9), (2, 8)])
@pytest.mark.parametrize(
    ("kernel", "hidden"),
    [*product(("auto", "naive", "blocked"), ("nothing", "keys before a start")),
     *product(("auto", "naive"), ("keys of a mask",))],
)  # fmt: skip
def test_attention_over_a_memory_is_attention_over_memory_and_segment(positions, S, M, kernel, hidden):
    attention = RelativeMultiHeadAttention(
        3, 12, 0.0, positions=positions, max_positions=M + S, kernel=kernel
    )
    key_start = first_keys(2, S, M + S) if hidden == "keys before a start" else None
    mask = None
    if hidden == "keys of a mask":
        mask = causal_mask(S, M + S, torch.device("cpu"))[:, :, None].clone()
        mask[0, M // 2] = False
    results = over_memory_and_plainly(fill_zeros(attention), S, M, mask, key_start)
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


def test_short_segments_over_long_memories_need_no_keys(monkeypatch):
    calls, real = [], absorbed.relative_attention
    monkeypatch.setattr(absorbed, "relative_attention", lambda *a, **k: calls.append(1) or real(*a, **k))
    attention, norm = RelativeMultiHeadAttention(3, 12, 0.5), torch.nn.LayerNorm(12)
    # In training it can't drop probabilities.
    for training, S, M, absorbs in (False, 2, 8, 1), (False, 3, 8, 0), (False, 2, 7, 0), (True, 2, 8, 0):
        calls.clear()
        attention.train(training).forward_with_memory(torch.randn(S, 2, 12), torch.randn(M, 2, 12), norm)
        assert len(calls) == absorbs


def test_a_mask_off_the_cpu_is_not_waited_for_and_its_future_is_hidden():
    """A meta tensor has no values to read, as those of a GPU are not there yet."""
    assert check_mask(torch.ones(3, 7, 1, dtype=torch.bool, device="meta"), 3, 7, 2).is_meta
    with pytest.raises(ValueError, match=r"\[3, 7, 2\] or \[3, 7, 1\]"):
        check_mask(torch.ones(3, 6, 1, dtype=torch.bool, device="meta"), 3, 7, 2)
