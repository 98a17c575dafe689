"""Attention, positions and layers, against the formulas."""

import math

import pytest
import torch

from memformers import (
    GRUGate,
    Memory,
    MemorySizes,
    RelativeMultiHeadAttention,
    TransformerXL,
    TransformerXLLayer,
)
from memformers.kernels.naive import causal_mask
from memformers.models import attention as attention_module
from memformers.models.attention import sinusoids
from tests.builders import fill_zeros, layer_parts, small_lm, small_xl
from tests.texts import EXACT, tokens


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("kernel", ["auto", "naive", "blocked", "sdpa"])
def test_a_query_looks_at_each_key_by_the_score_formula(positions, kernel):
    """One row at a time: (q + u)·k + (q + v)·r_d + s_d over √E, from each query's first key on."""
    H, E, S, K, B = 3, 4, 3, 7, 2
    own = fill_zeros(RelativeMultiHeadAttention(H, H * E, 0.0, positions=positions, kernel=kernel))
    x, key_start = torch.randn(K, B, H * E), torch.tensor([[0, 2, 2], [4, 0, 6]])
    found = own(query=x[-S:], key=x, value=x, key_start=key_start)
    looks = own.probabilities(query=x[-S:], key=x, key_start=key_start)
    terms, q, k, value = own.distance_terms(K), own.query(x), own.key(x), own.value(x)
    for b in range(B):
        for i in range(S):
            heads = []
            for h in range(H):
                own_head, keys = slice(h * E, (h + 1) * E), range(int(key_start[b, i]), K - S + i + 1)
                query = q[K - S + i, b, own_head]
                row = torch.zeros(K)
                for j in keys:
                    d = K - S + i - j
                    v = terms["v"][h] if "v" in terms else 0.0
                    score = (query + terms["u"][h]) @ k[j, b, own_head] + (query + v) @ terms["r"][h, d]
                    row[j] = ((score + (terms["s"][h, d] if "s" in terms else 0.0)) / math.sqrt(E)).exp()
                row = row / row.sum()
                torch.testing.assert_close(looks[b, h, i], row, **EXACT)
                heads.append(row @ value[:, b, own_head])
            torch.testing.assert_close(found[i, b], own.output(torch.cat(heads)), **EXACT)


def attention(**arguments):
    return RelativeMultiHeadAttention(**({"heads": 2, "d_model": 8} | arguments))


@pytest.mark.parametrize(
    ("build", "word"),
    [(lambda: attention(d_model=100, heads=8), "96 or 104"), (lambda: attention(d_model=4, heads=8), "as 8"),
     (lambda: attention(positions="rotary"), "rotary"), (lambda: attention(clamp_len=5), "clamp_len=5"),
     (lambda: attention(positions="sinusoidal", clamp_len=0), "clamp_len=0"),
     (lambda: attention(position_features=4), "position_fe"),
     (lambda: small_xl(norm="between"), "between"), (lambda: small_xl(n_layers=0), "n_layers=0"),
     (lambda: TransformerXLLayer(**(layer_parts() | {"d_model": 16})), "built for 12"),
     (lambda: TransformerXLLayer(**layer_parts("post"), gate="gru"), "post"),
     (lambda: TransformerXL(small_xl().layers, 3), "3 layers")],
)  # fmt: skip
def test_attention_and_layers_that_cannot_be_built_are_an_error(build, word):
    with pytest.raises(ValueError, match=word):
        build()


MASK, FIRST = causal_mask(3, 7, torch.device("cpu"))[:, :, None], torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({"mask": MASK.float()}, "boolean mask"), ({"mask": MASK[:, :-1]}, r"\[3, 7, 1\]"),
     ({"mask": MASK | True}, "future"), ({"mask": MASK & False}, "no visible key"),
     *(({"key_start": start}, "key_start") for start in (FIRST[:, :-1], FIRST.int(), FIRST[0])),
     ({"key_start": FIRST + 5}, "own key"),
     ({"key_start": FIRST + 4, "mask": MASK & (MASK.cumsum(1) < 4)}, "no visible key"),
     ({"query": torch.zeros(3, 2, 6)}, "expected query"), ({"value": torch.zeros(6, 2, 8)}, "expected query"),
     ({"query": torch.zeros(3, 8)}, "expected query"),
     (dict.fromkeys(("key", "value"), torch.zeros(2, 2, 8)), "at least 3 keys"),
     (dict.fromkeys(("key", "value"), torch.zeros(9, 2, 8)), "max_positions=8")],
)  # fmt: skip
def test_what_attention_can_not_be_called_with_is_an_error(arguments, word):
    x = torch.randn(7, 2, 8)
    with pytest.raises(ValueError, match=word):
        RelativeMultiHeadAttention(2, 8, max_positions=8)(
            **({"query": x[-3:], "key": x, "value": x} | arguments)
        )


@pytest.mark.usefixtures("float64")
def test_a_mask_hides_beside_what_a_document_and_a_window_do():
    stack, x, past = small_xl(), torch.randn(4, 2, 12), (torch.randn(3, 2, 12),) * 2
    doc_starts = torch.zeros(4, 2, dtype=torch.bool)
    doc_starts[2, 0] = True
    memory = Memory(past, valid=torch.tensor([3, 1]))
    stack.resize([MemorySizes(3, window=3)] * 2)
    mask = torch.ones(4, 7, dtype=torch.bool).tril(3)[..., None].repeat(1, 1, 2)
    mask[3, 5] = False
    wanted = mask & torch.ones(4, 7, dtype=torch.bool).triu(1)[..., None]  # 3 keys each
    wanted[2:, :5, 0] = False
    wanted[:, :2, 1] = False
    found, *_ = stack(x, memory, mask, doc_starts=doc_starts)
    stack.resize([MemorySizes(3)] * 2)
    torch.testing.assert_close(found, stack(x, Memory(past), wanted)[0], **EXACT)


def test_sinusoids_are_the_papers():
    features = sinusoids(6, 8, clamp_len=4)
    for d in range(6):
        for i in range(4):
            angle = min(d, 4) / 10_000 ** (2 * i / 8)
            assert features[d, i].item() == pytest.approx(math.sin(angle), abs=1e-15)
            assert features[d, 4 + i].item() == pytest.approx(math.cos(angle), abs=1e-15)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_table_of_sinusoids_is_computed_once_for_all_layers_calls_and_modes(compiled, monkeypatch):
    calls = []
    monkeypatch.setattr(attention_module, "_TABLES", {})
    monkeypatch.setattr(attention_module, "sinusoids", lambda *a: calls.append(a) or sinusoids(*a))
    lm = small_lm("transformer-xl", segment_len=5, position_features=6)
    torch.compiler.reset()
    forward = torch.compile(lm, backend="eager", fullgraph=True) if compiled else lm
    memory = None
    with torch.inference_mode():
        lm(tokens(5), lm(tokens(5)).memory)
    for _ in range(3):
        logits, memory, _ = forward(tokens(5), memory)
        logits.sum().backward()
    lm.double()(tokens(5))
    assert [length for length, *_ in calls] == [5, 10, 5]  # growing, and of another dtype
    assert not list(lm.buffers())


@pytest.mark.usefixtures("float64")
def test_the_gate_is_that_of_the_paper():
    gate, (x, y) = GRUGate(4), torch.randn(2, 3, 4)
    w_r, w_z, w_g = gate.of_output.weight.chunk(3)
    u_r, u_z = gate.of_input.weight.chunk(2)
    r, z = torch.sigmoid(y @ w_r.T + x @ u_r.T), torch.sigmoid(y @ w_z.T + x @ u_z.T - 2)
    h = torch.tanh(y @ w_g.T + (r * x) @ gate.of_reset.weight.T)
    torch.testing.assert_close(gate(x, y), (1 - z) * x + z * h, **EXACT)
