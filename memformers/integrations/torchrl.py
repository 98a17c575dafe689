"""TorchRL, with the extra ``torchrl``: a module that remembers, as its LSTMModule and GRUModule do."""

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer
from torchrl.modules import recurrent_mode

from memformers.common.text import UserError
from memformers.models.core import MemoryCore
from memformers.models.memory import N_VALID, Memory


class MemoryModule(TensorDictModuleBase):
    """A [`memformers.MemoryCore`][] of features F to D between an environment and a head. Raises ValueError
    for a compressive one whose ``segment_len`` is no multiple of its compression rate.

    It reads single steps, or, within ``set_recurrent_mode(True)`` as in losses, windows whose last dimension
    is time, with the same numbers. An episode starts where ``is_init`` is true, and is read exactly as alone;
    it and a window start with the memory that the tensordict has there. The gradient ends where the first
    segment began. Compressions learn from their own loss in every backward pass.

    Args:
        core: The network with memory.
        in_key: Key of the features, ``[…, F]``.
        out_key: Key of the outputs, ``[…, D]``.
        memory_key: Key of the memory, float32 ``[…, N]``. A step writes the next one, a window none.
    """

    def __init__(
        self,
        core: MemoryCore,
        in_key: Any = "observation",
        out_key: Any = "embed",
        memory_key: str = "memory",
    ):
        super().__init__()
        self.core, self.out_keys = core, [out_key, ("next", memory_key)]
        self.in_keys = [in_key, memory_key, "is_init"]
        F, S, D = core.config.d_input or core.config.d_model, core.config.segment_len, core.config.d_model
        if any(S % size.group for size in core.transformer.sizes):
            raise UserError(
                f"a memory's shapes must stay the same: expected segment_len={S} to be a multiple of "
                f"compression_rate={core.config.compression_rate}."
            )
        self.lengths = {name: len(tensor) for name, tensor in core.initial(1).tensors().items()}
        del self.lengths[N_VALID]
        self.size = 1 + sum(self.lengths.values()) * D
        self.spec = Unbounded(shape=(self.size + (S - 1) * F + 1,))

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Adds a memory of zeros where an episode starts."""
        return TensorDictPrimer({self.in_keys[1]: self.spec}, expand_specs=True)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Read ``in_keys``, ``[…]`` steps or ``[…, T]`` windows, and write ``out_keys``."""
        needed = {self.in_keys[1]: "make_tensordict_primer()", "is_init": "InitTracker()"}
        for key, transform in needed.items():
            if tensordict.get(key, None) is None:
                raise UserError(f"the tensordict has no {key!r}; append {transform} to the environment.")
        x, memory, is_init = (tensordict.get(key) for key in self.in_keys)
        is_window = recurrent_mode()
        flat, rows = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, memory))
        is_init = is_init.reshape(-1, x.shape[-2] if is_window else 1)
        first = torch.cat((torch.ones_like(is_init[:, :1]), is_init[:, 1:]), dim=1)
        starts = first.flatten().nonzero()[:, 0]  # each episode in a window is a separate stream
        lengths = starts.diff(append=starts.new_tensor([len(flat)]))
        parts = pad_sequence(flat.split(lengths.tolist()), batch_first=True)
        rows = rows[starts] if is_window else rows.masked_fill(is_init, 0)
        output, after = self.read(parts, lengths, rows)
        if not is_window:
            tensordict.set(self.out_keys[1], after.view_as(memory))
        is_step = torch.arange(parts.shape[1], device=x.device) < lengths[:, None]
        return tensordict.set(self.out_keys[0], output[is_step].view(*x.shape[:-1], -1))

    def read(self, x: Tensor, lengths: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Read the first ``lengths [P]`` of features ``x [P, T, F]`` after the memories ``rows [P, N]``:
        outputs ``[P, T, D]`` and new rows. A row is the memory before the running segment, the features of
        that segment, and their number. These are read again, so that all segments start together."""
        S, (P, T, F) = self.core.config.segment_len, x.shape
        before, running, clock = rows.split([self.size, (S - 1) * F, 1], dim=1)
        clock, features = clock.long(), torch.cat((running.view(P, S - 1, F).to(x.dtype), x), dim=1)
        ends = clock + lengths[:, None]  # [P, 1]
        at = torch.arange(int(ends.max()), device=x.device)
        place = torch.where(at < clock, at, S - 1 + at - clock).clamp(max=S - 2 + T)  # [P, ·]
        inputs = features.gather(1, place[..., None].expand(-1, -1, F)).transpose(0, 1)
        outputs = []
        for begin, segment in zip(range(0, len(at), S), inputs.split(S), strict=True):
            active = (ends[:, 0] > begin).nonzero()[:, 0]
            output, after, loss = self.core(segment[:, active], self.unpacked(before[active]))
            output = _WithLoss.apply(output, loss) if loss.requires_grad else output
            outputs.append(output.new_zeros(len(segment), P, output.shape[2]).index_copy(1, active, output))
            full = ends[active, 0] >= begin + S
            if full.any():
                before = before.index_copy(0, active[full], self.packed(after.streams(full)))
        place = (clock + torch.arange(T, device=x.device)).clamp(max=len(at) - 1)
        read = torch.cat(outputs).transpose(0, 1)
        output = read.gather(1, place[..., None].expand(-1, -1, read.shape[2]))
        place = (ends - ends % S + torch.arange(S - 1, device=x.device)).clamp(max=len(at) - 1)
        running = inputs.transpose(0, 1).gather(1, place[..., None].expand(-1, -1, F)).flatten(1)
        return output, torch.cat((before, running.detach().float(), (ends % S).float()), dim=1)

    def packed(self, memory: Memory) -> Tensor:
        tensors = memory.tensors()
        parts = [tensors[N_VALID][:, None]] + [
            tensors[name].transpose(0, 1).flatten(1) for name in self.lengths
        ]
        return torch.cat([part.float() for part in parts], dim=1)

    def unpacked(self, rows: Tensor) -> Memory:
        dtype, D = self.core.transformer.weight.dtype, self.core.config.d_model
        parts = rows[:, 1:].split([n * D for n in self.lengths.values()], dim=1)
        tensors = {N_VALID: rows[:, 0].long()}
        for (name, n), part in zip(self.lengths.items(), parts, strict=True):
            tensors[name] = part.unflatten(1, (n, D)).transpose(0, 1).to(dtype)
        return Memory.from_tensors(tensors)


class _WithLoss(torch.autograd.Function):
    """An output unchanged, and a scalar loss that is added to whatever the output's loss is."""

    @staticmethod
    def forward(_: Any, output: Tensor, loss: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())
