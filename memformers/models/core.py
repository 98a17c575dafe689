"""A memory transformer from features to features, in place of a recurrent network."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, overload

import torch
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple

from memformers.common.errors import UserError
from memformers.common.fields import check_value
from memformers.models.config import CoreConfig
from memformers.models.io import Pretrained
from memformers.models.memory import Memory
from memformers.models.stack import build_transformer, children_first, initialise_weights, reset_parameters

if TYPE_CHECKING:
    from memformers.common.types import typed_like


class CoreOutput(NamedTuple):
    """What [`MemoryCore`][] returns for a segment.

    Examples:
        >>> import torch
        >>> from memformers import MemoryCore
        >>> read = MemoryCore(3, 32)(torch.randn(16, 2, 3))  # features [S, B, F]
        >>> read.output.shape, read.memory.mem_len
        (torch.Size([16, 2, 32]), 16)
    """

    output: Tensor
    """``[S, B, D]``."""
    memory: Memory
    """To pass in with the streams' next segment."""
    auxiliary_loss: Tensor
    """A scalar to add to the loss: it trains the compression functions. 0 if nothing was compressed."""


# So that torch.export.save can write a program that returns it.
_register_namedtuple(CoreOutput, serialized_type_name="memformers.CoreOutput")


class MemoryCore(Pretrained):
    """A memory transformer for any features, used like ``nn.GRU``; if their width F differs from D, a linear
    layer projects them. It is stateless: pass the memory in, get the new one back. Unlike ``nn.GRU`` it also
    returns a third value, the auxiliary loss, which trains only the compressions; ``return_loss=False``
    leaves it out, and the compressions then learn in each backward pass through the output.

    Args:
        config: All settings; or the width F of the features, as ``d_input``.
        d_model: The width D of the output.
        d_input: F, by its name; d_model if not given.
        settings: More settings of a [`memformers.CoreConfig`][], such as ``model="compressive"``,
            ``n_layers=2``, ``mem_len=32``.

    Raises:
        ValueError: As CoreConfig, for a setting that it doesn't have, and for a config with other settings.

    Examples:
        >>> import torch
        >>> from memformers import CoreConfig, MemoryCore
        >>> core = MemoryCore(3, 32, mem_len=32)  # or MemoryCore(CoreConfig(d_input=3, …))
        >>> memory = None
        >>> for segment in torch.randn(48, 2, 3).split(16):  # features [S, B, F]
        ...     output, memory, auxiliary_loss = core(segment, memory)
        >>> output.shape, memory.mem_len
        (torch.Size([16, 2, 32]), 32)
        >>> output, memory = core(segment, memory, return_loss=False)  # as output, hidden = gru(x, hidden)
    """

    config: CoreConfig
    config_class = CoreConfig

    # mypy would reject config=… beside a width, which the implementation refuses, too.
    @overload
    def __init__(self, config: CoreConfig) -> None: ...
    @overload
    def __init__(self, d_input: int, /, d_model: int = ..., **settings: Any) -> None: ...
    @overload
    def __init__(self, *, d_input: int, d_model: int = ..., **settings: Any) -> None: ...
    def __init__(  # type: ignore[misc]
        self,
        config: CoreConfig | int | None = None,
        d_model: int | None = None,
        *,
        d_input: int | None = None,
        **settings: Any,
    ):
        super().__init__()
        self.config = complete_config(config, settings | named(d_input=d_input, d_model=d_model))
        D = self.config.d_model
        F = self.config.d_input or D
        self.encode = nn.Linear(F, D) if F != D else nn.Identity()
        self.dropout = nn.Dropout(self.config.dropout)
        self.transformer = build_transformer(self.config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw fresh weights, those of the compression functions last."""
        reset_parameters([module for _, module in children_first(self.encode)])
        initialise_weights(self.transformer)

    @overload
    def forward(
        self,
        x: Tensor,
        memory: Memory | None = None,
        doc_starts: Tensor | None = None,
        *,
        through_memory: bool = False,
        return_loss: Literal[True] = True,
    ) -> CoreOutput: ...
    @overload
    def forward(
        self,
        x: Tensor,
        memory: Memory | None = None,
        doc_starts: Tensor | None = None,
        *,
        through_memory: bool = False,
        return_loss: Literal[False],
    ) -> tuple[Tensor, Memory]: ...
    def forward(
        self,
        x: Tensor,
        memory: Memory | None = None,
        doc_starts: Tensor | None = None,
        *,
        through_memory: bool = False,
        return_loss: bool = True,
    ) -> CoreOutput | tuple[Tensor, Memory]:
        """Read features ``x [S, B, F]``: output ``[S, B, D]``, next memory and auxiliary loss. Raises
        ValueError for features, memory or starts of another shape, dtype or device, or of another model.

        Args:
            memory: The memory that the last segment returned; None for an empty one.
            doc_starts: Boolean ``[S, B]``, true where a stream's new document or episode begins: it sees
                nothing of what came before, neither in the segment nor in memory.
            through_memory: Whether what this segment adds to the memory keeps its gradient.
            return_loss: False returns output and memory alone. Each backward pass through the output then
                adds the gradient of the auxiliary loss to the compressions.
        """
        x = self.dropout(self.encoded(x))  # [S, B, D]
        output, memory, auxiliary_loss = self.transformer(
            x, memory, doc_starts=doc_starts, through_memory=through_memory
        )
        if return_loss:
            return CoreOutput(output, memory, auxiliary_loss)
        if auxiliary_loss.requires_grad:
            output = _WithLoss.apply(output, auxiliary_loss)
        return output, memory

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def initial(self, batch: int) -> Memory:
        """An empty memory of ``batch`` streams in the shapes of a full one ([`memformers.Memory`][])."""
        weight = self.transformer.weight
        return Memory.empty(self.config, batch, dtype=weight.dtype, device=weight.device)

    def encoded(self, x: Tensor) -> Tensor:
        """Features ``x [S, B, F]`` as the first layer reads them without dropout, ``[S, B, D]``: in the
        weights' dtype, under autocast too, so that memory is as well. UserError in the same cases as
        ``forward``."""
        F = self.config.d_input or self.config.d_model
        weight = self.transformer.weight
        if not isinstance(x, Tensor):
            raise UserError(f"expected features as a torch.Tensor, got {type(x).__name__}; convert them.")
        if x.dim() != 3 or 0 in x.shape or x.shape[2] != F:
            raise UserError(f"expected features [segment, batch, {F}], at least 1 of each, got {[*x.shape]}.")
        # Autocast converts features, but not to another device. PyTorch can't tell whether it's on for the
        # meta device.
        is_converted = x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)
        if x.device != weight.device or not is_converted:
            raise UserError(
                f"expected features as {weight.dtype} on {weight.device}, as the weights, got {x.dtype} on "
                f"{x.device}; convert them."
            )
        return self.encode(x).to(weight.dtype)


def complete_config(config: CoreConfig | int | None, settings: Mapping[str, Any]) -> CoreConfig:
    """The ``config``, or one of these ``settings``, where ``config`` may be the width of the features.
    UserError for a config with settings, and for a setting that no CoreConfig has."""
    is_width = isinstance(config, int) and not isinstance(config, bool)
    # All settings at once.
    if config is not None and not is_width:
        check_value("config", config, CoreConfig)
        if settings:
            raise UserError(
                f"expected a config or settings, got {', '.join(sorted(settings))} beside the config; use "
                f"dataclasses.replace(config, …) to change it."
            )
        return cast(CoreConfig, config)

    # The width of the features and other settings by their names.
    if is_width and "d_input" in settings:
        raise UserError(f"d_input is {config} and {settings['d_input']}; pass it once.")
    if is_width:
        settings = {"d_input": config, **settings}
    known_names = [field.name for field in fields(CoreConfig)]
    for name in settings:
        if name not in known_names:
            matches = difflib.get_close_matches(name, known_names, n=1)
            hint = f"; did you mean {matches[0]!r}?" if matches else "."
            raise UserError(f"{name} is not a setting of a MemoryCore{hint}")
    return CoreConfig(**settings)


def named(**values: Any) -> dict[str, Any]:
    """The ``values`` that are given."""
    return {name: value for name, value in values.items() if value is not None}


class _WithLoss(torch.autograd.Function):
    """Return the output unchanged, and add a scalar loss's gradient in the output's backward pass."""

    @staticmethod
    def forward(_: Any, output: Tensor, loss: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())
