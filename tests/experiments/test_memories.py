"""The memories of two papers compute what the papers' equations say; that they satisfy what every memory must
is tested in test_conformance.py."""

import pytest
import torch

from experiments.memories.infini import InfiniAttention, feature, matrix_of
from experiments.memories.memory_tokens import MemoryTokens
from experiments.memories.selective import Selective, least_like_newer
from memformers import MemoryLM, ModelConfig

TINY = {"vocab_size": 7, "d_model": 8, "heads": 2, "n_layers": 2, "d_ff": 8, "segment_len": 5}


def test_the_delta_rule_writes_only_what_the_matrix_does_not_hold():
    network = MemoryLM(ModelConfig(model=InfiniAttention, **TINY)).transformer
    attention = network.memory_layers[0].self_attn
    slots, left, belongs = torch.rand(5, 1, 8), torch.randn(3, 1, 8), torch.tensor([[False], [True], [True]])
    (M,), (z,) = matrix_of(slots, attention)
    wanted, total = M.clone(), z.clone()
    for x in network.memory_layers[0].attention_input(left)[1:, 0]:
        for head in range(2):
            k = feature(attention.key(x)).view(2, 4)[head]
            v = attention.value(x).view(2, 4)[head]
            wanted[head] += k[:, None] * (v - k @ M[head] / (k @ z[head]))
            total[head] += k
    (M,), (z,) = matrix_of(network.grow(0, slots, left, belongs), attention)
    torch.testing.assert_close(M, wanted)
    torch.testing.assert_close(z, total)


def test_memory_tokens_are_read_by_the_next_segment_and_carry_a_gradient_if_they_are_to():
    lm = MemoryLM(ModelConfig(model=MemoryTokens, memory_config={"tokens_of_memory": 3}, **TINY))
    text = torch.randint(7, (5, 2))
    for through_memory in (True, False):
        memory = lm(text, through_memory=through_memory).memory
        assert [len(x) for x in memory.c_mem] == [3, 0]
        assert memory.c_mem[0].requires_grad == through_memory
    fresh, after = lm(text).logits, lm(text, memory).logits
    assert not torch.equal(fresh, after)


@pytest.mark.parametrize("newest", [None, (9, 14, 4, 20)])
def test_what_is_kept_is_least_like_any_newer_position_of_its_document(newest):
    key, n, n_kept = torch.randn(14, 4, 8), 9, 4
    chosen = least_like_newer(key, n, n_kept, None if newest is None else torch.tensor(newest))
    for b in range(4):
        first = 14 - min((newest or (14,) * 4)[b], 14)
        centred = key[first:, b] - key[first:, b].mean(0)
        likeness = {
            first + i: max(float(torch.cosine_similarity(x, y, dim=0)) for y in centred[i + 1 :])
            for i, x in enumerate(centred[:-1])
            if first + i < n
        }
        kept = sorted(sorted(likeness, key=lambda i: likeness[i])[:n_kept])
        assert chosen[:, b].tolist()[n_kept - len(kept) :] == kept
        assert all(i < first for i in chosen[:, b].tolist()[: n_kept - len(kept)])


@pytest.mark.parametrize("token_shift", [False, True])
def test_a_kept_position_stays_as_it_was_and_one_that_was_dropped_stays_away(token_shift):
    """With a token shift, as it was shifted when it left the newest, predecessor included. The oldest goes."""
    sizes = TINY | {"mem_len": 5, "c_mem_len": 4, "compression_rate": 5, "n_layers": 1}
    sizes["token_shift"] = token_shift
    lm = MemoryLM(ModelConfig(model=Selective, **sizes)).double()
    layer, memory, before = lm.transformer.memory_layers[0], None, set()
    torch.nn.init.normal_(layer.shift) if token_shift else None
    x = torch.randn(40, 1, 8, dtype=torch.float64)
    rows = torch.cat((x[:1], x[1:] + layer.shift * x[:-1])) if token_shift else x
    for i, part in enumerate(x.split(5)):
        _, memory, _ = lm.transformer(part, memory)
        distances = [(row - rows).abs().sum((1, 2)) for row in (memory.c_mem or [()])[0]]
        assert all(d.min() < 1e-9 for d in distances)
        found = {int(d.argmin()) for d in distances}
        assert len(found) == (4 if i else 0)
        kept = sorted(before)[i > 1 :]
        assert found <= {*kept, *range(5 * (i - 1), 5 * i)}
        before = found
