"""TorchRL, with the extra ``torchrl``: a module that remembers, as its LSTMModule and GRUModule do."""

try:
    import tensordict as tensordict
    import torchrl as torchrl
except ImportError as error:
    raise ImportError(f"{error}; install it: pip install '.[torchrl]' in a clone of the repository") from None

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer
from torchrl.modules import recurrent_mode

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_value
from memformers.integrations.torchrl_memories import StepMemories
from memformers.models.core import MemoryCore
from memformers.models.memory import N_VALID, Memory


class MemoryModule(TensorDictModuleBase):
    """A [`memformers.MemoryCore`][] of features F to D between an environment and a head. Raises ValueError
    for a compressive one whose ``segment_len`` is no multiple of its compression rate.

    It reads single steps, or, within ``set_recurrent_mode(True)`` as in losses, windows whose last dimension
    is time, with the same numbers. An episode starts where ``is_init`` is true, and is read exactly as alone;
    it and a window start with the memory of that step. The gradient ends where the first segment began.
    Compressions learn from their own loss in every backward pass.

    The module keeps what its steps remember, a segment's memory once; the tensordict has only an id of it.
    So windows can start at any of the newest ``n_steps`` steps, in the process that acted.

    Args:
        core: The network with memory.
        in_key: Key of the features, ``[…, F]``.
        out_key: Key of the outputs, ``[…, D]``.
        memory_key: Key of the memory: its id, int64 ``[…, 1]``, or all of it, float32 ``[…, N]``. A step
            writes the next one, a window none.
        n_steps: How many steps, of all environments together, are kept; None to write the whole memory into
            the tensordict in every step, for data that leave the process or outlive it.
    """

    def __init__(
        self,
        core: MemoryCore,
        in_key: Any = "observation",
        out_key: Any = "embed",
        memory_key: str = "memory",
        n_steps: int | None = 65_536,
    ):
        super().__init__()
        self.core = core
        self.in_keys = [in_key, memory_key, "is_init"]
        self.out_keys = [out_key, ("next", memory_key)]
        S = core.config.segment_len
        D = core.config.d_model
        F = core.config.d_input or D
        if any(S % size.group for size in core.transformer.sizes):
            raise UserError(
                f"a memory's shapes must stay the same: expected segment_len={S} to be a multiple of "
                f"compression_rate={core.config.compression_rate}."
            )
        self.lengths = {name: len(tensor) for name, tensor in core.initial(1).tensors().items()}
        del self.lengths[N_VALID]
        self.size = 1 + sum(self.lengths.values()) * D
        self.memories: StepMemories | None = None
        if n_steps is None:
            # A memory, the features of the running segment, and their number.
            self.spec = Unbounded(shape=(self.size + (S - 1) * F + 1,))
        else:
            check_value("n_steps", n_steps, Count)
            self.memories = StepMemories(n_steps, self.size, F, S)
            self.spec = Unbounded(shape=(1,), dtype=torch.int64)

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Adds zeros, which are an empty memory, where an episode starts."""
        return TensorDictPrimer({self.in_keys[1]: self.spec}, expand_specs=True)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Read ``in_keys``, ``[…]`` steps or ``[…, T]`` windows, and write ``out_keys``."""
        needed = {self.in_keys[1]: "make_tensordict_primer()", "is_init": "InitTracker()"}
        for key, transform in needed.items():
            if tensordict.get(key, None) is None:
                raise UserError(f"the tensordict has no {key!r}; append {transform} to the environment.")
        x, memory, is_init = (tensordict.get(key) for key in self.in_keys)

        # Streams of different lengths: each step, or each episode in a window.
        is_window = recurrent_mode()
        flat = x.reshape(-1, x.shape[-1])  # [steps, F]
        states = memory.reshape(-1, memory.shape[-1])  # [steps, N], or ids [steps, 1]
        is_init = is_init.reshape(-1, x.shape[-2] if is_window else 1)  # [windows, T]
        is_first = torch.cat((torch.ones_like(is_init[:, :1]), is_init[:, 1:]), dim=1)
        starts = is_first.flatten().nonzero()[:, 0]  # [P]
        lengths = starts.diff(append=starts.new_tensor([len(flat)]))  # [P]
        streams = pad_sequence(flat.split(lengths.tolist()), batch_first=True)  # [P, T, F]

        # The memory at the start of each stream; zeros are an empty one.
        states = states[starts] if is_window else states.masked_fill(is_init, 0)
        rows = states if self.memories is None else self.memories.read(states[:, 0])  # [P, N]
        output, new_rows = self.read_streams(streams, lengths, rows)
        if not is_window and self.memories is not None:
            new_ids = self.memories.add(states[:, 0], flat, new_rows)
            tensordict.set(self.out_keys[1], new_ids.view_as(memory))
        elif not is_window:
            tensordict.set(self.out_keys[1], new_rows.view_as(memory))
        is_step = torch.arange(streams.shape[1], device=x.device) < lengths[:, None]  # [P, T]
        return tensordict.set(self.out_keys[0], output[is_step].view(*x.shape[:-1], -1))

    def read_streams(self, x: Tensor, lengths: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Read the first ``lengths [P]`` of features ``x [P, T, F]`` after the memories ``rows [P, N]``:
        outputs ``[P, T, D]`` and new rows. A row is the memory before the running segment, the features of
        that segment, and their number. These are read again, so that all segments start together."""
        S = self.core.config.segment_len
        P, T, F = x.shape
        packed, running, clock = rows.split([self.size, (S - 1) * F, 1], dim=1)
        clock = clock.long()  # [P, 1], the number of features in the running segment
        ends = clock + lengths[:, None]  # [P, 1]

        # The features of the running segment and the new ones, without the gap between them.
        features = torch.cat((running.view(P, S - 1, F).to(x.dtype), x), dim=1)  # [P, S − 1 + T, F]
        steps = torch.arange(int(ends.max()), device=x.device)  # [L]
        sources = torch.where(steps < clock, steps, S - 1 + steps - clock)  # [P, L]
        inputs = gather_steps(features, sources.clamp(max=S - 2 + T)).transpose(0, 1)  # [L, P, F]

        # Segment by segment, the streams that have not ended; a memory is kept after a whole segment.
        outputs = []
        for begin, segment in zip(range(0, len(steps), S), inputs.split(S), strict=True):
            active = (ends[:, 0] > begin).nonzero()[:, 0]  # [n]
            past = self.unpacked(packed[active])
            output, memory = self.core(segment[:, active], past, return_loss=False)
            outputs.append(output.new_zeros(len(segment), P, output.shape[2]).index_copy(1, active, output))
            is_full = ends[active, 0] >= begin + S
            if is_full.any():
                packed = packed.index_copy(0, active[is_full], self.packed(memory.streams(is_full)))

        # The outputs of the new features, and the features of the segment that runs now.
        last = len(steps) - 1
        new_steps = clock + torch.arange(T, device=x.device)  # [P, T]
        output = gather_steps(torch.cat(outputs).transpose(0, 1), new_steps.clamp(max=last))
        running_steps = ends - ends % S + torch.arange(S - 1, device=x.device)  # [P, S − 1]
        running = gather_steps(inputs.transpose(0, 1), running_steps.clamp(max=last)).flatten(1)
        return output, torch.cat((packed, running.detach().float(), (ends % S).float()), dim=1)

    def packed(self, memory: Memory) -> Tensor:
        """A ``memory`` of n streams as rows ``[n, size]``. Raises ValueError for tensors that an empty memory
        doesn't have, since the next memory would have no place for them."""
        tensors = memory.tensors()
        lengths = {name: len(x) for name, x in tensors.items() if name != N_VALID}
        if lengths != self.lengths:
            raise UserError(
                f"a memory's shapes must stay the same: expected {self.lengths}, got {lengths}; use a memory "
                f"without a state and of constant lengths."
            )
        parts = [tensors[N_VALID][:, None]]
        for name in self.lengths:
            parts.append(tensors[name].transpose(0, 1).flatten(1))
        return torch.cat([part.float() for part in parts], dim=1)

    def unpacked(self, rows: Tensor) -> Memory:
        """The memory of rows ``[n, size]``."""
        dtype = self.core.transformer.weight.dtype
        D = self.core.config.d_model
        parts = rows[:, 1:].split([n * D for n in self.lengths.values()], dim=1)
        tensors = {N_VALID: rows[:, 0].long()}
        for (name, n), part in zip(self.lengths.items(), parts, strict=True):
            tensors[name] = part.unflatten(1, (n, D)).transpose(0, 1).to(dtype)
        return Memory.from_tensors(tensors)


def gather_steps(x: Tensor, steps: Tensor) -> Tensor:
    """The ``steps [P, n]`` of ``x [P, T, F]``: ``[P, n, F]``."""
    return x.gather(1, steps[..., None].expand(-1, -1, x.shape[2]))
