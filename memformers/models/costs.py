"""The cost of a model's attention, and its reach."""

from typing import Any

from memformers.models.config import ModelConfig


def attention_operations(config: ModelConfig) -> int:
    """Operations of all layers' attention for one token, with full memories; a multiply-add is two.

    Per layer over K = C + M + S keys: 2·K·D each for scores by content, scores by position and weighted
    values, also where the causal mask hides them; 4·K·D² / S for keys and values, which a segment's S queries
    share; and 4·D² for queries and output. Position vectors are shared by all streams and don't count.
    """
    lengths, D, S = config.lengths, config.d_model, config.segment_len
    K = lengths.c_mem_len + lengths.mem_len + S
    return config.n_layers * (6 * K * D + 4 * K * D * D // S + 4 * D * D)


def memory_facts(config: ModelConfig) -> dict[str, Any]:
    """The facts about a memory in a run's ``run.json``: how many positions before the segment one layer looks
    at, and all of them together; a layer's keys beside the segment's, M + C; and attention operations a
    token."""
    reach, lengths = config.remembered_positions, config.lengths
    return {
        "memory": {"one_layer": reach, "all_layers": reach * config.n_layers},
        "keys": lengths.mem_len + lengths.c_mem_len,
        "attention_operations": attention_operations(config),
    }
