"""The compute, memory and hours of training the papers' models on 1 and on 8 GPUs, as estimates.

Run it with ``python -m experiments.scaling``; it writes the table of docs/scaling.md, which says what is
assumed and counted, and trains nothing.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from memformers.common.fields import replace_nested
from memformers.common.files import write_text
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.report.rendering import markdown_table as table
from memformers.training.config import TrainConfig, preset_names, read_preset
from memformers.training.optimizers import Muon, build_optimizers

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
# Assumed, of each GPU.
TERAFLOPS = 400.0
"""TFLOP/s in bfloat16, in a whole step."""
GIGABYTES = 50.0
"""GB/s that each rank sends."""
RANKS = (1, 8)
FLOAT32_BYTES = 4
HEAD = [
    "preset", "the paper's result", "million parameters", "billion tokens", "GiB on 1 GPU", "hours on 1 GPU",
    "GiB on each of 8 GPUs", "hours on 8 GPUs",
]  # fmt: skip


def row_of(name: str) -> list[str]:
    """The row of a preset."""
    preset = read_preset(name)
    model = replace(preset["config"].model, vocab_size=preset["vocab_size"])
    config = replace_nested(preset["config"], model=model, precision="bfloat16", device="cuda")
    costs = []
    for ranks in RANKS:
        step = step_of(config, ranks)
        # Either computation or communication is the limit, since they overlap.
        computing = step["operations"] / TERAFLOPS / 1e12
        sending = step["sent"] / GIGABYTES / 1e9
        streams_per_rank = -(-config.batch_size // ranks)
        tokens_per_step = ranks * streams_per_rank * model.segment_len
        hours = max(computing, sending) * config.max_tokens / tokens_per_step / 3600
        costs += [f"{step['bytes'] / 2**30:,.1f}", f"{hours:,.0f}"]
    parameters = f"{step['parameters'] / 1e6:,.0f}"
    return [name, preset["reaches"], parameters, f"{config.max_tokens / 1e9:,.1f}", *costs]


def step_of(config: TrainConfig, ranks: int) -> dict[str, float]:
    """What each of ``ranks`` needs for a step: ``operations``, bytes of weights, gradients and moments
    (``state``), of all (``bytes``), and ``sent``. Layers are alike: models of one and of two are counted."""
    config = replace_nested(config, batch_size=-(-config.batch_size // ranks), parallel="single")
    sizes = config.model.memory_sizes
    lengths = {name: getattr(sizes[0], name) for name in ("mem_len", "c_mem_len", "compression_rate")}
    one_layer, two_layers = (
        count(replace(config, model=replace(config.model, **lengths, n_layers=n_layers)))
        for n_layers in (1, 2)
    )
    counts = {}
    for name in two_layers:
        per_layer = two_layers[name] - one_layer[name]
        counts[name] = one_layer[name] + (len(sizes) - 1) * per_layer

    # Weights, gradients and moments are float32. DDP has a copy of the gradients in its buckets.
    weights = FLOAT32_BYTES * counts["weights"]
    state = 2 * weights + FLOAT32_BYTES * counts["moments"]
    buckets = weights if ranks > 1 else 0
    return {
        "parameters": counts["parameters"],
        "operations": counts["operations"],
        "state": state,
        "bytes": state + buckets + counts["memories"] + counts["kept"],
        # An all-reduce in a ring sends W − 1 of W parts twice.
        "sent": 2 * (ranks - 1) * weights / ranks,
    }


def count(config: TrainConfig) -> Counter[str]:
    """A step of one rank with full memories: floating-point ``operations``, bytes that the forward pass keeps
    (``kept``) and of ``memories``, and numbers of ``parameters``, ``weights`` and ``moments``."""
    # The model and what its optimizers hold, without numbers.
    with torch.device("meta"):
        lm = MemoryLM(replace(config.model, kernel="naive"))
        counts = Counter(parameters=sum(map(torch.numel, lm.parameters())))
        for optimizer in build_optimizers(lm, config):
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    n = weight.numel()
                    # Muon has one moment of each weight; AdamW two, and a count of steps.
                    n_moments = n if isinstance(optimizer, Muon) else 2 * n + 1
                    counts.update(weights=n, moments=n_moments)

    # The step, on tensors that have a device but no numbers.
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True), OnGPU():
        lm.to_empty(device="cpu")  # on which autocast supports fake tensors
        tokens, memory = full_inputs(lm, config.batch_size)
        memories = [x for layer in memory.layers for x in (layer.mem, layer.slots)]
        with Operations() as counter, sdpa_kernel(SDPBackend.MATH):
            loss(lm, tokens, memory, config).backward()
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            loss(lm, tokens, memory, config)
    counts["operations"] = counter.total
    counts["memories"] = storage_bytes(memories)
    counts["kept"] = storage_bytes(kept, without=(*lm.parameters(), *memories))
    return counts


def storage_bytes(tensors: Iterable[Tensor], without: Iterable[Tensor] = ()) -> int:
    """Bytes of the storages of ``tensors``, each counted once, leaving out those of ``without``."""
    excluded = {tensor.untyped_storage()._cdata for tensor in without}
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


class Operations(TorchDispatchMode):
    """Counts operations of matrix products, without the hooks of PyTorch's FlopCounterMode."""

    total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if operations := flop_registry.get(function._overloadpacket):
            self.total += operations(*args, **(kwargs or {}), out_val=output)
        return output


class OnGPU(TorchFunctionMode):
    """Keeps what a GPU keeps for dropout: a byte a number."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.dropout and kwargs["training"] and kwargs["p"]:
            return torch.native_dropout(args[0], kwargs["p"], True)[0]
        return function(*args, **kwargs)


@torch.no_grad()
def full_inputs(lm: MemoryLM, streams: int) -> tuple[Tensor, Memory]:
    """A segment ``[S, B]``, and the memory after so many segments that it is full."""
    S = lm.config.segment_len
    n_segments = lm.config.remembered_positions // S + 2
    memory = Memory(())
    for _ in range(n_segments):
        inputs = [torch.empty(S, streams, lm.config.d_model) for _ in lm.transformer.layers]
        memory = lm.transformer.remember(memory, inputs, None, S)
    return torch.zeros(S, streams, dtype=torch.int64), memory


def loss(lm: MemoryLM, tokens: Tensor, memory: Memory, config: TrainConfig) -> Tensor:
    """A step's loss, without the check of the tokens' values, which fake tensors don't have."""
    with torch.autocast("cpu", torch.bfloat16, enabled=config.step.precision == "bfloat16"):
        x = lm.dropout(lm.embed(tokens))  # [S, B, D]
        hidden, _, auxiliary_loss = lm.transformer(x, memory)
        return F.cross_entropy(lm.predict(hidden).flatten(0, 1), tokens.clone().flatten()) + auxiliary_loss


def main() -> None:
    """Write the table of the page again."""
    text, _, _ = PAGE.read_text(encoding="utf-8").partition("| preset |")
    rows = [row_of(name) for name in preset_names()]
    write_text(PAGE, f"{text}{table(HEAD, rows)}\n")
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
