"""Attention, positions and layers, against the formulas."""

import math

import pytest
import torch

from memformers import (
    GRUGate,
    MemoryLayer,
    RelativeMultiHeadAttention,
    TransformerXL,
)
from memformers.kernels.naive import causal_mask
from memformers.models import sinusoids as sinusoids_module
from memformers.models.sinusoids import sinusoids
from tests.builders import fill_zeros, layer_parts, small_lm, small_xl
from tests.kernels.test_kernels import one_score_at_a_time
from tests.texts import EXACT, memory_of, tokens


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("kernel", ["auto", "naive", "blocked", "sdpa"])
def test_a_query_looks_at_each_key_by_the_score_formula(positions, kernel):
    H, E, B = 3, 4, 2
    S = 3
    K = 7
    attn = fill_zeros(RelativeMultiHeadAttention(H, H * E, 0.0, positions=positions, kernel=kernel))
    x = torch.randn(K, B, H * E)
    key_start = torch.tensor([[0, 2, 2], [4, 0, 6]])
    output = attn(query=x[-S:], key=x, value=x, key_start=key_start)
    looks = attn.probabilities(query=x[-S:], key=x, key_start=key_start)
    maps = (attn.query, attn.key, attn.value)
    q, k, v = (project(x).view(K, B, H, E).permute(1, 2, 0, 3) for project in maps)
    terms = {"query": q[:, :, -S:], "key": k, **attn.distance_terms(K), "key_start": key_start}
    wanted = one_score_at_a_time(value=torch.eye(K).expand(B, H, K, K), **terms)
    torch.testing.assert_close(looks, wanted, **EXACT)
    attended = one_score_at_a_time(value=v, **terms)  # [B, H, S, E]
    torch.testing.assert_close(output, attn.output(attended.permute(2, 0, 1, 3).flatten(2)), **EXACT)


def attention(**arguments):
    return RelativeMultiHeadAttention(**({"n_heads": 2, "d_model": 8} | arguments))


def attend(**arguments):
    x = torch.randn(7, 2, 8)
    attention(max_positions=8)(**({"query": x[-3:], "key": x, "value": x} | arguments))


MASK = causal_mask(3, 7, torch.device("cpu"))[:, :, None]
FIRST = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("do", "word"),
    [(lambda: attention(d_model=100, n_heads=8), "96 or 104"),
     (lambda: attention(d_model=4, n_heads=8), "as 8"),
     (lambda: attention(positions="rotary"), "rotary"), (lambda: attention(clamp_len=5), "clamp_len=5"),
     (lambda: attention(positions="sinusoidal", clamp_len=0), "clamp_len=0"),
     (lambda: attention(position_features=4), "position_fe"),
     (lambda: small_xl(norm="between"), "between"), (lambda: small_xl(n_layers=0), "n_layers=0"),
     (lambda: MemoryLayer(**(layer_parts() | {"d_model": 16})), "built for 12"),
     (lambda: MemoryLayer(**layer_parts("post"), gate="gru"), "post"),
     (lambda: TransformerXL(list(small_xl().layers), 3, 0), "3 layers"),
     (lambda: attend(mask=MASK.float()), "boolean mask"), (lambda: attend(mask=MASK[:, 1:]), r"\[3, 7, 1\]"),
     (lambda: attend(mask=MASK | True), "future"), (lambda: attend(mask=MASK & False), "no visible key"),
     *((lambda x=x: attend(key_start=x), "key_start") for x in (FIRST[:, :-1], FIRST.int(), FIRST[0])),
     (lambda: attend(key_start=FIRST + 5), "own key"),
     (lambda: attend(key_start=FIRST + 4, mask=MASK & (MASK.cumsum(1) < 4)), "no visible key"),
     *((lambda x=x: attend(query=x), "expected query") for x in (torch.zeros(3, 2, 6), torch.zeros(3, 8))),
     (lambda: attend(value=torch.zeros(6, 2, 8)), "expected query"),
     *((lambda n=n: attend(**dict.fromkeys(("key", "value"), torch.zeros(n, 2, 8))), word)
       for n, word in ((2, "at least 3 keys"), (9, "max_positions=8")))],
)  # fmt: skip
def test_wrong_settings_and_inputs_of_attention_are_errors(do, word):
    with pytest.raises(ValueError, match=word):
        do()


@pytest.mark.usefixtures("float64")
def test_a_mask_hides_beside_what_a_document_and_a_window_do():
    stack = small_xl(mem_len=3)
    x = torch.randn(4, 2, 12)
    past = (torch.randn(3, 2, 12),) * 2
    doc_starts = torch.zeros(4, 2, dtype=torch.bool)
    doc_starts[2, 0] = True
    memory = memory_of(past, n_valid=torch.tensor([3, 1]))
    for layer in stack.layers:
        layer.window = 3
    mask = torch.ones(4, 7, dtype=torch.bool).tril(3)[..., None].repeat(1, 1, 2)
    mask[3, 5] = False
    wanted = mask & torch.ones(4, 7, dtype=torch.bool).triu(1)[..., None]  # 3 keys each
    wanted[2:, :5, 0] = False
    wanted[:, :2, 1] = False
    output, *_ = stack(x, memory, mask, doc_starts=doc_starts)
    for layer in stack.layers:
        layer.window = None
    torch.testing.assert_close(output, stack(x, memory_of(past), wanted)[0], **EXACT)


def test_sinusoids_are_the_papers():
    angles = [[min(d, 4) / 10_000 ** (2 * i / 8) for i in range(4)] for d in range(6)]
    wanted = [[*map(math.sin, row), *map(math.cos, row)] for row in angles]
    wanted = torch.tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(sinusoids(6, 8, clamp_len=4), wanted, rtol=0, atol=1e-15)


def test_sinusoids_made_in_inference_mode_are_good_for_training(monkeypatch):
    monkeypatch.setattr(sinusoids_module, "_TABLES", {})
    lm = small_lm("transformer-xl")
    memory = None
    with torch.inference_mode():
        lm(tokens(7), lm(tokens(7)).memory)
    for _ in range(2):
        logits, memory, _ = lm(tokens(7), memory)
        logits.sum().backward()


@pytest.mark.usefixtures("float64")
def test_the_gate_is_that_of_the_paper():
    gate = GRUGate(4)
    x, y = torch.randn(2, 3, 4)
    w_r, w_z, w_g = gate.W.weight.chunk(3)
    u_r, u_z = gate.U.weight.chunk(2)
    r = torch.sigmoid(y @ w_r.T + x @ u_r.T)
    z = torch.sigmoid(y @ w_z.T + x @ u_z.T - 2)
    h = torch.tanh(y @ w_g.T + (r * x) @ gate.U_g.weight.T)
    torch.testing.assert_close(gate(x, y), (1 - z) * x + z * h, **EXACT)
