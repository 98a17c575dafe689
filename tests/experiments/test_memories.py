"""Every memory satisfies what all memories must, and what tables say of it is true. Those of papers compute
what the papers' equations say."""

import pytest
import torch
from torch.nn.functional import elu

from experiments.memories import ALL_MEMORIES, FOLDER, ROOT
from experiments.memories.infini import InfiniAttention, matrix_of
from experiments.memories.memory_tokens import MemoryTokens
from memformers import LayerMemory, MemoryLM, ModelConfig, UpdateContext, assert_conforms
from memformers.models.facts import BYTES, memory_facts
from memformers.models.rules import BUILT_IN

TINY = {"vocab_size": 7, "d_model": 8, "n_heads": 2, "n_layers": 2, "d_ff": 8, "segment_len": 5}
every_memory = pytest.mark.parametrize("memory", ALL_MEMORIES, ids=lambda memory: memory.name)


@every_memory
def test_every_memory_conforms(memory):
    assert_conforms(memory.import_path)


@every_memory
def test_the_keys_and_bytes_of_a_table_are_those_of_a_full_memory(memory):
    config = ModelConfig(model=memory.import_path, d_model=12, n_heads=3, n_layers=5, segment_len=8,
                         mem_len=16,                         c_mem_len=6, compression_rate=4)  # fmt: skip
    letters = {"n": 5, "D": 12, "E": 4, "M": 16, "C": 6}
    if "m" in memory.keys:
        letters["m"] = config.memory_config.tokens_of_memory
    facts = memory_facts(config)
    assert facts["keys"] == eval(memory.keys, letters)
    assert facts["state_bytes"] == BYTES * eval(memory.state, letters)


def test_the_list_has_every_memory_of_the_package_and_of_the_folder():
    files = {f"{FOLDER}/{path.name}" for path in (ROOT / FOLDER).glob("*.py") if "__" not in path.name}
    models = [memory.model for memory in ALL_MEMORIES]
    assert {model.rpartition(":")[0] for model in models if ":" in model} == files
    assert [model for model in models if ":" not in model] == [*BUILT_IN]


@pytest.mark.parametrize("n_written", [3, 2])
def test_the_delta_rule_writes_only_what_the_matrix_does_not_hold(n_written):
    """Of three inputs, those of the current document; if it starts with the second, the matrix is empty."""
    transformer = MemoryLM(ModelConfig(model=InfiniAttention, **TINY)).transformer
    rule = transformer.memory_rules[0]
    layer = transformer.memory_layers[0]
    slots = torch.rand(5, 1, 8)
    x = torch.randn(3, 1, 8)
    n_valid = None if n_written == 3 else torch.tensor([n_written])
    after, _ = rule.update(LayerMemory(x[:0], slots), x, UpdateContext(layer, x, n_valid))

    (M,), (z,) = matrix_of(slots if n_written == 3 else torch.zeros_like(slots), 2)
    wanted = M.clone()
    norm = z.clone()
    for position in layer.attention_input(x)[3 - n_written :, 0]:
        for head in range(2):
            k = (elu(layer.self_attn.key(position)) + 1).view(2, 4)[head]
            v = layer.self_attn.value(position).view(2, 4)[head]
            held = k @ M[head] / (k @ z[head]) if n_written == 3 else 0.0
            wanted[head] += k[:, None] * (v - held)
            norm[head] += k
    (M,), (z,) = matrix_of(after.slots, 2)
    torch.testing.assert_close(M, wanted)
    torch.testing.assert_close(z, norm)


def test_memory_tokens_are_read_by_the_next_segment_and_carry_a_gradient_if_they_are_to():
    lm = MemoryLM(ModelConfig(model=MemoryTokens, memory_config={"tokens_of_memory": 3}, **TINY))
    text = torch.randint(7, (5, 2))
    for through_memory in (True, False):
        memory = lm(text, through_memory=through_memory).memory
        assert [layer.n_slots for layer in memory.layers] == [3, 0]
        assert memory.layers[0].slots.requires_grad == through_memory
    fresh, after = lm(text).logits, lm(text, memory).logits
    assert not torch.equal(fresh, after)
