"""The memories of two papers compute what the papers' equations say; that they satisfy what every memory must
is tested in test_conformance.py."""

import torch

from experiments.memories.infini import InfiniAttention, feature, matrix_of
from experiments.memories.memory_tokens import MemoryTokens
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
