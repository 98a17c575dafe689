"""The cost of a model's attention, and its reach."""

from typing import Any

from memformers.models.config import ModelConfig


def attention_operations(config: ModelConfig) -> int:
    """Operations of all layers' attention for one token, with full memories; a multiply-add is two.

    Per layer over K = C + M + S keys: 2·K·D each for scores by content, scores by position and weighted
    values, also where the causal mask hides them; 4·K·D² / S for keys and values, which a segment's S queries
    share; and 4·D² for queries and output. Position vectors are shared by all streams and don't count.
    """
    D, S = config.d_model, config.segment_len
    keys = [own.keys + S for own in config.layer_lengths]
    return sum(6 * K * D + 4 * K * D * D // S + 4 * D * D for K in keys)


def memory_facts(config: ModelConfig) -> dict[str, Any]:
    """The facts about a memory in a run's ``run.json``: the number of positions before the segment that one
    layer sees, and that all layers together see; a layer's keys without the segment's, M + C, as a mean if
    layers differ; and attention operations per token."""
    keys = sum(own.keys for own in config.layer_lengths) / config.n_layers
    return {
        "memory": {"one_layer": config.remembered_positions, "all_layers": sum(config.positions_of_layers)},
        "keys": int(keys) if keys.is_integer() else keys,
        "attention_operations": attention_operations(config),
    }
