"""Every memory satisfies what all memories must, and what tables say of it is true."""

import pytest
import torch

from experiments.memories import ALL_MEMORIES, FOLDER, ROOT
from experiments.memories.gated_delta import GatedDelta
from experiments.memories.infini import InfiniAttention
from experiments.memories.learned_eviction import LearnedEviction
from memformers import MemoryLM, ModelConfig, assert_conforms
from memformers.models.facts import BYTES, memory_facts
from memformers.models.rules import BUILT_IN
from tests.experiments.networks import TINY

every_memory = pytest.mark.parametrize("memory", ALL_MEMORIES, ids=lambda memory: memory.name)


@every_memory
def test_every_memory_conforms(memory):
    assert_conforms(memory.import_path)


@every_memory
def test_tables_have_the_keys_and_bytes_of_a_full_memory(memory):
    config = ModelConfig(model=memory.import_path, d_model=12, n_heads=3, n_layers=5, segment_len=8,
                         mem_len=16,                         c_mem_len=6, compression_rate=4)  # fmt: skip
    letters = {"n": 5, "D": 12, "E": 4, "M": 16, "C": 6, "S": 8}
    if "m" in memory.keys:
        letters["m"] = config.memory_config.tokens_of_memory
    facts = memory_facts(config)
    assert facts["keys"] == eval(memory.keys, letters)
    assert facts["state_bytes"] == BYTES * eval(memory.state, letters)


def test_the_list_has_every_memory():
    files = {f"{FOLDER}/{path.name}" for path in (ROOT / FOLDER).glob("*.py") if "__" not in path.name}
    models = [memory.model for memory in ALL_MEMORIES]
    assert {model.rpartition(":")[0] for model in models if ":" in model} == files
    assert [model for model in models if ":" not in model] == [*BUILT_IN]


@pytest.mark.parametrize(
    "memory", [GatedDelta, InfiniAttention, LearnedEviction], ids=lambda memory: memory.__name__
)
def test_a_matrix_is_not_read_through_a_mask(memory):
    transformer = MemoryLM(ModelConfig(model=memory, **TINY)).transformer
    x = torch.randn(5, 1, 8)
    with pytest.raises(ValueError, match="doc_starts"):
        transformer(x, mask=torch.ones(5, 5, 1, dtype=torch.bool).tril())
