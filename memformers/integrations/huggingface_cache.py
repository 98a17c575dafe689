"""A memory in a ``Cache`` of transformers, which calls update and return as its models do."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from memformers.common.errors import UserError
from memformers.models.memory import LayerMemory, Memory


class MemoryLayer(CacheLayerMixin):
    """What one layer of a model remembers, which the model writes as a whole after each call."""

    supports_early_init = False  # its shapes are known after the first call

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.memory: LayerMemory | None = None
        self.n_valid: Tensor | None = None
        self.n_read = 0

    def _map(self, change: Any) -> None:
        """Apply ``change`` to all tensors ``[·, B, …]``."""
        if self.memory is not None:
            self.memory = self.memory.map(change)
        if self.n_valid is not None:
            self.n_valid = change(self.n_valid[None])[0]

    @property
    def batch_size(self) -> int:
        return -1 if self.memory is None else self.memory.mem.shape[1]

    def get_seq_length(self) -> int:
        """How many ids have been read."""
        return self.n_read

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.n_read + query_length, 0

    def reset(self) -> None:
        self.memory = None
        self.n_valid = None
        self.n_read = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[:, indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=1))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise UserError("a memory can't go back to an earlier token; keep a copy of the cache instead.")

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu"))

    def prefetch(self) -> None:
        """Nothing: the model moves it to where it reads."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.update(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        raise UserError("a memory has no keys and values to update; a model of memformers writes it.")


class MemoryCache(Cache):
    """A memory for code that passes a ``Cache`` of transformers: a call of a model of ``config`` continues
    from it, updates and returns it. Its methods select, repeat and reorder rows, as in other caches."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(layers=[MemoryLayer() for _ in range(config.num_hidden_layers)])


def memory_in(cache: Cache, n_layers: int, device: torch.device) -> Memory | None:
    """The memory in a ``cache``, on ``device``; None if it has read nothing. Raises ValueError for a cache of
    other layers, or of another number of them than ``n_layers``."""
    layers = cache.layers
    if len(layers) != n_layers or not all(isinstance(layer, MemoryLayer) for layer in layers):
        raise UserError(
            f"expected a cache of memories of {n_layers} layers, got a {type(cache).__name__} of "
            f"{len(layers)}; use huggingface.MemoryCache(model.config), a Memory or None."
        )
    memories = [layer.memory for layer in layers if layer.memory is not None]
    if not memories:
        return None
    n_valid = layers[0].n_valid
    return Memory(tuple(memories), n_valid).map(lambda x: x.to(device))


def write_memory(cache: Cache, memory: Memory, n_ids: int) -> None:
    """Keep the ``memory`` after ``n_ids`` more ids in ``cache``."""
    for layer, layer_memory in zip(cache.layers, memory.layers, strict=True):
        layer.memory = layer_memory
        layer.n_valid = memory.n_valid
        layer.n_read += n_ids
        layer.is_initialized = True
