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
TERAFLOPS, GIGABYTES = 400.0, 50.0
"""Assumed: TFLOP/s of a GPU in bfloat16, in a whole step; and GB/s that each rank sends."""
RANKS = (1, 8)
HEAD = ["preset", "the paper's result", "million parameters", "billion tokens", "GiB on 1 GPU",
        "hours on 1 GPU", "GiB on each of 8 GPUs", "hours on 8 GPUs"]  # fmt: skip


def count(config: TrainConfig) -> Counter[str]:
    """A step of one rank with full memories: floating-point ``operations``, bytes that the forward pass keeps
    (``kept``) and of ``memories``, and numbers of ``parameters``, ``weights`` and ``moments``."""
    with torch.device("meta"):
        lm = MemoryLM(replace(config.model, kernel="naive"))
        counts = Counter(parameters=sum(map(torch.numel, lm.parameters())))
        for optimizer in build_optimizers(lm, config):
            for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
                n = weight.numel()
                counts.update(weights=n, moments=n if isinstance(optimizer, Muon) else 2 * n + 1)
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
    counts["operations"], counts["memories"] = counter.total, held(memories)
    counts["kept"] = held(kept, but=(*lm.parameters(), *memories))
    return counts


def step_of(config: TrainConfig, ranks: int) -> dict[str, float]:
    """What each of ``ranks`` needs for a step: ``operations``, bytes of weights, gradients and moments
    (``state``), of all (``bytes``), and ``sent``. Layers are alike: models of one and of two are counted."""
    config = replace_nested(config, batch_size=-(-config.batch_size // ranks), parallel="single")
    sizes = config.model.memory_sizes
    lengths = {name: getattr(sizes[0], name) for name in ("mem_len", "c_mem_len", "compression_rate")}
    models = (replace(config.model, **lengths, n_layers=n) for n in (1, 2))
    one, two = (count(replace(config, model=model)) for model in models)
    counts = {name: one[name] + (len(sizes) - 1) * (two[name] - one[name]) for name in two}
    # An all-reduce in a ring sends W - 1 parts twice. DDP has a copy of the gradients in its buckets.
    weights = 4 * counts["weights"]
    state, copies = 2 * weights + 4 * counts["moments"], weights * (ranks > 1)
    return {name: counts[name] for name in ("parameters", "operations")} | {
        "state": state,
        "bytes": state + copies + counts["memories"] + counts["kept"],
        "sent": 2 * (ranks - 1) * weights / ranks,
    }


def held(tensors: Iterable[Tensor], but: Iterable[Tensor] = ()) -> int:
    """Bytes of the storages of ``tensors``, each counted once, without those of ``but``."""
    storages, others = ({(s := t.untyped_storage())._cdata: s.nbytes() for t in of} for of in (tensors, but))
    return sum(size for at, size in storages.items() if at not in others)


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
    S, memory = lm.config.segment_len, Memory(())
    for _ in range(lm.config.remembered_positions // S + 2):
        inputs = [torch.empty(S, streams, lm.config.d_model) for _ in lm.transformer.layers]
        memory = lm.transformer.remember(memory, inputs, None, S)
    return torch.zeros(S, streams, dtype=torch.int64), memory


def loss(lm: MemoryLM, tokens: Tensor, memory: Memory, config: TrainConfig) -> Tensor:
    """A step's loss, without the check of the tokens' values, which fake tensors don't have."""
    with torch.autocast("cpu", torch.bfloat16, enabled=config.step.precision == "bfloat16"):
        x = lm.dropout(lm.embed(tokens))  # [S, B, D]
        hidden, _, auxiliary_loss = lm.transformer(x, memory)
        return F.cross_entropy(lm.predict(hidden).flatten(0, 1), tokens.clone().flatten()) + auxiliary_loss


def row_of(name: str) -> list[str]:
    preset, costs = read_preset(name), []
    model = replace(preset["config"].model, vocab_size=preset["vocab_size"])
    config = replace_nested(preset["config"], model=model, precision="bfloat16", device="cuda")
    for ranks in RANKS:
        step = step_of(config, ranks)
        seconds = max(step["operations"] / TERAFLOPS / 1e12, step["sent"] / GIGABYTES / 1e9)
        tokens = ranks * -(-config.batch_size // ranks) * model.segment_len
        hours = seconds * config.max_tokens / tokens / 3600
        costs += [f"{step['bytes'] / 2**30:,.1f}", f"{hours:,.0f}"]
    sizes = f"{step['parameters'] / 1e6:,.0f}", f"{config.max_tokens / 1e9:,.1f}"
    return [name, preset["reaches"], *sizes, *costs]


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8").partition("| preset |")[0]
    write_text(PAGE, f"{text}{table(HEAD, [row_of(name) for name in preset_names()])}\n")
    print(f"written: {PAGE}")
