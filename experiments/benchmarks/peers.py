"""The other implementations, each with the same interface: tokens ``[S, B]`` and memory in; logits
``[S, B, vocabulary]``, the next memory and the reconstruction loss out. labml-nn's model is shown to compute
the same as ours before it is timed."""

import importlib
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from labml import tracker
from torch import Tensor, nn

tracker.debug = lambda *_: None  # labml-nn calls it; labml 0.5.3 no longer has it

from labml_nn.transformers import compressive as labml_compressive  # noqa: E402
from labml_nn.transformers import xl as labml_xl  # noqa: E402
from labml_nn.transformers.feed_forward import FeedForward  # noqa: E402
from labml_nn.transformers.xl.relative_mha import RelativeMultiHeadAttention  # noqa: E402

from experiments.benchmarks.measuring import check_errors, relative_error  # noqa: E402
from memformers import MemoryLM, ModelConfig, from_labml  # noqa: E402
from memformers.kernels.naive import causal_mask  # noqa: E402

LABML = "labml-nn"
LUCIDRAINS = "compressive-transformer-pytorch"
TOLERANCE = 1e-4
"""The largest RMS error of a whole model in float32 relative to the RMS value, in logits, reconstruction loss
and gradient: the kernels' 1e-5, and more for several layers."""


class LabmlLM(nn.Module):
    """labml-nn's model with the embedding, head and memory rules of its own experiments."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        parts: dict[str, Any] = {
            "d_model": config.d_model,
            "self_attn": RelativeMultiHeadAttention(config.heads, config.d_model, 0.0),
            "feed_forward": FeedForward(config.d_model, config.d_ff, 0.0),
            "dropout_prob": 0.0,
        }
        self.src_embed = nn.Embedding(config.vocab_size, config.d_model)
        self.transformer: Any
        if config.model == "compressive":
            f_c = labml_compressive.Conv1dCompression(config.compression_rate, config.d_model)
            layer = labml_compressive.CompressiveTransformerLayer(compress=f_c, **parts)
            self.transformer = labml_compressive.CompressiveTransformer(layer, config.n_layers)
            self.loss = labml_compressive.AttentionReconstructionLoss(self.transformer.layers)
        else:
            layer = labml_xl.TransformerXLLayer(**parts)
            self.transformer = labml_xl.TransformerXL(layer, config.n_layers)
        self.generator = nn.Linear(config.d_model, config.vocab_size)
        for name, parameter in self.named_parameters():  # zeros would hide a wrong position
            if name.endswith(("key_pos_embeddings", "key_pos_bias", "query_pos_bias")):
                nn.init.normal_(parameter, std=0.1)

    def forward(self, tokens: Tensor, memory: Any) -> tuple[Tensor, Any, Tensor]:
        """Logits, the next memory and the reconstruction loss."""
        mem: list[Tensor]
        c_mem: list[Tensor]
        mem, c_mem = memory or ([], [])
        S, past = len(tokens), sum(map(len, (*mem[:1], *c_mem[:1])))
        mask = causal_mask(S, past + S, tokens.device)[:, :, None]
        x, no_loss = self.src_embed(tokens), torch.zeros(())
        lengths, compressive = self.config.memory_sizes[0], self.config.model == "compressive"
        hidden, new_mem = self.transformer(x, *((mem, c_mem) if compressive else (mem,)), mask)
        logits, mem = self.generator(hidden), joined(mem, new_mem)
        if not compressive:
            return logits, ([m[-lengths.mem_len :] for m in mem], []), no_loss
        c = lengths.compression_rate
        n = max(-(-(len(mem[0]) - lengths.mem_len) // c), 0)
        if not n:
            return logits, (mem, c_mem), no_loss
        old, mem = [m[: n * c] for m in mem], [m[n * c :] for m in mem]
        with torch.no_grad():
            new = [layer.compress(m) for layer, m in zip(self.transformer.layers, old, strict=True)]
        c_mem = [m[-lengths.c_mem_len :] for m in joined(c_mem, new)]
        return logits, (mem, c_mem), self.loss(new_mem, old)


def joined(kept: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    """The memory ``[t, B, D]`` of each layer with what is new in it."""
    return [torch.cat(pair) for pair in zip(kept, new, strict=True)] if kept else new


class LucidrainsLM(nn.Module):
    """compressive-transformer-pytorch's model, batch first inside, as similar to ours as its settings
    allow: plain residuals, and each layer reads its own memory."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        package = importlib.import_module("compressive_transformer_pytorch")
        self.model = package.CompressiveTransformer(
            num_tokens=config.vocab_size,
            dim=config.d_model,
            depth=config.n_layers,
            heads=config.heads,
            seq_len=config.segment_len,
            mem_len=config.mem_len,
            cmem_len=config.c_mem_len,
            cmem_ratio=config.compression_rate,
            gru_gated_residual=False,
            enhanced_recurrence=False,
        )

    def forward(self, tokens: Tensor, memory: Any) -> tuple[Tensor, Any, Tensor]:
        """Logits, the next memory and the reconstruction loss."""
        logits, memory, loss = self.model(tokens.t(), memories=memory)
        return logits.transpose(0, 1), memory, loss.sum()


def lucidrains_is_installed() -> bool:
    """Whether :class:`LucidrainsLM` can be built; ``make bench`` installs what it needs."""
    return importlib.util.find_spec("compressive_transformer_pytorch") is not None


def two_alike(config: ModelConfig) -> tuple[MemoryLM, LabmlLM]:
    """Our model and labml-nn's with the same weights, none of them zero."""
    theirs, ours = LabmlLM(config), MemoryLM(config)
    ours.load_state_dict(from_labml(theirs.state_dict(), max_positions=config.longest_attention))
    return ours, theirs


def check_parity(ours: MemoryLM, theirs: LabmlLM, batches: list[Tensor]) -> float:
    """The largest error of logits and reconstruction loss over segments with growing memories, until
    some of them were compressed, and then of the gradient. Raises ValueError above the tolerance."""
    errors = {}
    our_memory, their_memory = None, None
    segments = ours.config.memory_sizes[0].mem_len // ours.config.segment_len + 3
    for i in range(segments):
        learn = i == segments - 1
        with torch.set_grad_enabled(learn):
            tokens = batches[i % len(batches)]
            logits, our_memory, loss = ours(tokens, our_memory)
            their_logits, their_memory, their_loss = theirs(tokens, their_memory)
        errors[f"logits of segment {i}"] = relative_error(logits, their_logits)
        errors[f"reconstruction loss of segment {i}"] = relative_error(loss, their_loss)
        if learn:
            (F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + loss).backward()
            (F.cross_entropy(their_logits.flatten(0, 1), tokens.flatten()) + their_loss).backward()
            errors["gradient"] = relative_error(*two_gradients(ours, theirs))
    error = check_errors(errors, TOLERANCE, "labml-nn's model")
    for model in (ours, theirs):
        model.zero_grad()
    return error


def two_gradients(ours: MemoryLM, theirs: LabmlLM) -> tuple[Tensor, Tensor]:
    """Our whole gradient in one vector, and theirs, converted in the same way as their weights."""

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}

    own = gradients(ours)
    mapped = from_labml(gradients(theirs), max_positions=ours.config.longest_attention)
    return torch.cat([x.flatten() for x in own.values()]), torch.cat([mapped[name].flatten() for name in own])
