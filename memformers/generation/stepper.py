"""Reading step by step, with the results of the forward pass. Keys and values are cached, so each is
projected once. When a segment is full, the model makes the next memory; positions that stay in it keep their
keys."""

from typing import Any

import torch
from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_value
from memformers.generation.cache import KeyCache, attends_to_keys, empty_inputs
from memformers.models.core import MemoryCore
from memformers.models.hooks import is_hooked
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory, check_streams
from memformers.models.memory_checks import check_memory
from memformers.models.stack import all_modules, eval_mode


class Stepper:
    """A model that reads B streams, any number of steps at a time, with keys and values cached. It reads in
    eval mode and without gradient.

    Each result is that of the model's forward pass for the running segment after [`memory`][], with the
    modules and weights that the model has in that call. If they differ from those of the last call, keys and
    values are computed again. A new module, hook, attribute or tensor is always noticed, and so is a change
    of a weight that PyTorch counts (``_version``). It doesn't count fused optimizers and operations on
    ``.data``: these are noticed if they change one of 37 numbers, one in each 37th of a parameter or buffer.
    So a step of an optimizer and a moving average are noticed; an operation on ``.data`` that changes less
    than a 37th of a weight may not be.

    A model with hooks, a replaced ``forward`` or sharded weights (FSDP2) is called with the whole running
    segment in each step, which takes longer.

    Args:
        model: A core, which reads features ``[t, B, F]`` to its outputs ``[t, B, D]``; or a language model,
            which reads tokens ``[t, B]`` to the logits ``[1, B, vocab_size]`` after the last of each segment.
        batch: The number of streams, B.
        memory: Where to start from, as the forward pass returns it; None for an empty memory.

    Raises:
        ValueError: For a memory of another model or batch, and for fewer learned positions than it needs.

    Examples:
        >>> import torch
        >>> from memformers import CoreConfig, MemoryCore, Stepper
        >>> stepper = Stepper(MemoryCore(CoreConfig(d_input=3, d_model=32)).eval(), batch=2)
        >>> for features in torch.randn(100, 2, 3):  # [B, F] each
        ...     output = stepper.step(features)
        >>> output.shape, stepper.memory().mem_len
        (torch.Size([2, 32]), 64)
    """

    def __init__(self, model: MemoryCore | MemoryLM, batch: int, memory: Memory | None = None):
        check_value("batch", batch, Count)
        if not isinstance(model, MemoryCore | MemoryLM):
            raise UserError(
                f"expected a MemoryLM or a MemoryCore, got a {type(model).__name__}; pass the model in it."
            )
        self.model: Any = model
        self.config = model.config
        self.cache: KeyCache | None = None
        self.doc_starts: Tensor | None = None
        self.slides = isinstance(model, MemoryLM) and self.config.model == "transformer"
        """Whether it reads the newest S tokens again for each token, as a model without memory must."""
        self.last: Tensor | None = None
        """The newest result, ``[B, …]``; None before the first step."""
        # Outside of inference mode, so that the state can be used in both modes.
        with torch.inference_mode(False), torch.no_grad(), eval_mode(model):
            like = empty_inputs(model.transformer, batch)  # [0, B, D]
            self.past = check_memory(memory, like, model.transformer.sizes).detach()
            if isinstance(model, MemoryCore):
                self.running = like.new_empty(0, batch, model.config.d_input or model.config.d_model)
            else:
                self.running = like.new_empty(0, batch, dtype=torch.int64)
            self._current_cache()

    def memory(self) -> Memory:
        """The memory before the current segment, as the forward pass returns it."""
        with torch.inference_mode(False), torch.no_grad():
            return self.past.map(torch.clone)

    def step(self, x: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """One step ``[B, …]`` to its result ``[B, …]``, with ``doc_starts [B]``, as [`read`][] does."""
        return self.read(x[None], None if doc_starts is None else doc_starts[None])[0]

    def read(self, x: Tensor, doc_starts: Tensor | None = None) -> Tensor:
        """``x [T, B, …]``, T ≥ 1, to its results, in order. Where boolean ``doc_starts [T, B]`` is true a new
        document begins, which sees nothing before it; segment boundaries don't move. UserError for arguments
        that don't fit."""
        expected = list(self.running.shape[1:])
        if isinstance(self.model, MemoryLM):
            self.model.check_tokens(x, expected[0])
        elif not isinstance(x, Tensor):
            raise UserError(f"expected features as a torch.Tensor, got {type(x).__name__}; convert them.")
        elif list(x.shape[1:]) != expected or not len(x):
            raise UserError(f"expected [steps, {str(expected)[1:]}, at least one step, got {list(x.shape)}.")
        check_streams("doc_starts", doc_starts, torch.bool, x.shape[:2], x.device)
        # Outside of inference mode, so that the state can be used in both modes.
        with torch.inference_mode(False), torch.no_grad():
            if self._is_current():
                return self._read_segments(self.cache, x, doc_starts)
            with eval_mode(self.model):
                return self._read_segments(self._current_cache(), x, doc_starts)

    def _read_segments(self, cache: KeyCache | None, x: Tensor, doc_starts: Tensor | None) -> Tensor:
        """[`read`][] with the current cache, or without one."""
        results = []
        begin = 0
        while begin < len(x):
            room = self.config.segment_len - (0 if self.slides else len(self.running))
            part = slice(begin, begin + room)
            starts = None if doc_starts is None else doc_starts[part]
            results.append(self._read_within_segment(cache, x[part], starts))
            begin = part.stop
        return torch.cat(results)

    def _read_within_segment(self, cache: KeyCache | None, x: Tensor, new_starts: Tensor | None) -> Tensor:
        """Read ``x [t, B, …]`` with ``new_starts [t, B]``, for which the running segment has room. The state
        changes at the end, all at once, so that Ctrl-C never leaves half a step."""
        # The segment so far, or for a model without memory the newest S tokens.
        t = len(x)
        S = self.config.segment_len
        running = torch.cat((self.running, x))[-S:]
        doc_starts = self._joined_starts(x, new_starts)
        is_full = len(running) == S and not self.slides

        # The result, and after a full segment the next memory.
        memory: Any = None
        if cache is not None:
            past = self.past if doc_starts is None else self.past.reset(doc_starts[0])
            output = self._read_newest(cache, x, doc_starts)
            if is_full:
                memory = self.model.transformer.remember(past, cache.inputs.unbind(), doc_starts, S)
            result = self._result(output, t)
        elif must_be_called(self.model):
            output, memory, _ = self.model(running, self.past, doc_starts=doc_starts)
            result = output[-1:] if isinstance(self.model, MemoryLM) else output[-t:]
        else:
            output, memory, _ = self.model.transformer(
                self._encode(running), self.past, doc_starts=doc_starts
            )
            result = self._result(output, t)

        # What the next step continues from.
        if is_full:
            self.cache = None  # until all of its layers are in the next segment
            if cache is not None:
                cache.begin(self.model.transformer, memory, S)
            self.past = memory
            self.running = running[:0]
            self.doc_starts = None
        else:
            self.running = running
            self.doc_starts = doc_starts
        self.cache = cache
        self.last = result[-1]
        return result

    def _joined_starts(self, x: Tensor, new_starts: Tensor | None) -> Tensor | None:
        """The starts ``[·, B]`` of the running segment with ``x [t, B, …]``; None for none."""
        if self.doc_starts is None and new_starts is None:
            return None
        none = torch.zeros(len(self.running) + len(x), x.shape[1], dtype=torch.bool, device=x.device)
        old = none[: len(self.running)] if self.doc_starts is None else self.doc_starts
        new = none[len(self.running) :] if new_starts is None else new_starts
        return torch.cat((old, new))[-self.config.segment_len :]

    def _result(self, output: Tensor, t: int) -> Tensor:
        """From a segment's output ``[·, B, D]``, the logits after the last token, or the newest t outputs."""
        return self.model.predict(output[-1:]) if isinstance(self.model, MemoryLM) else output[-t:]

    def _is_current(self) -> bool:
        """Whether the cache holds the running segment, and the model is in eval mode and unchanged since
        then."""
        cache = self.cache
        return (
            cache is not None
            and cache.past is self.past
            and cache.n_read == len(self.running)
            and not is_hooked(self.model)  # which also sees a hook of all modules
            and cache.matches()
        )

    def _current_cache(self) -> KeyCache | None:
        """The cache of the running segment for the model, in eval mode, as it is now; None if it can't have
        one."""
        transformer = self.model.transformer
        if self.slides or must_be_called(self.model) or not attends_to_keys(transformer):
            return None
        # A new cache holds what the memory has; then the running segment is read again.
        cache = self.cache
        is_kept = cache is not None and cache.past is self.past and cache.n_read <= len(self.running)
        if cache is None or not is_kept or not cache.matches():
            batch = self.running.shape[1]
            check_memory(self.past, empty_inputs(transformer, batch), transformer.sizes)
            cache = KeyCache.build(self.model, self.past, batch)
        if cache.n_read < len(self.running):
            self._read_newest(cache, self.running[cache.n_read :], self.doc_starts)
        self.cache = cache
        return cache

    def _read_newest(self, cache: KeyCache, x: Tensor, doc_starts: Tensor | None) -> Tensor:
        """Read ``x [t, B, …]``, the newest of the running segment with ``doc_starts [·, B]``, into ``cache``:
        outputs ``[t, B, D]``."""
        self.cache = None  # until the step is complete
        if not cache.n_read and doc_starts is not None:
            cache.hide_past(doc_starts[0])
        return self.model.transformer.read_cached(self._encode(x), self.past, cache, doc_starts)

    def _encode(self, x: Tensor) -> Tensor:
        return self.model.encoded(x) if isinstance(self.model, MemoryCore) else self.model.embed(x)


def must_be_called(model: nn.Module) -> bool:
    """Whether ``model`` itself must be called: something observes or changes the calls of its modules, or
    gathers sharded weights before them."""
    for module in all_modules(model):
        if is_hooked(module) or any(hasattr(x, "full_tensor") for x in module._parameters.values()):
            return True
    return False
