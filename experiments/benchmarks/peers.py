"""labml-nn's model, with the interface of ours. It is shown to compute the same before it is timed."""

from typing import Any

import torch
import torch.nn.functional as F
from labml import tracker
from torch import Tensor, nn

tracker.debug = lambda *_: None  # labml-nn calls it; labml 0.5.3 no longer has it

from labml_nn.transformers import compressive, xl  # noqa: E402
from labml_nn.transformers.feed_forward import FeedForward  # noqa: E402
from labml_nn.transformers.xl.relative_mha import RelativeMultiHeadAttention  # noqa: E402

from experiments.benchmarks.measuring import check_errors, relative_error  # noqa: E402
from memformers import MemoryLM, ModelConfig, from_labml  # noqa: E402
from memformers.kernels.naive import causal_mask  # noqa: E402

LABML = "labml-nn"
TOLERANCE = 1e-4
"""The largest relative RMS error of a whole model in float32."""

LayerTensors = list[Tensor]
"""Of each layer, ``[M, B, D]`` or ``[C, B, D]``."""


class LabmlLM(nn.Module):
    """labml-nn's model with the embedding, head and memory rules that its experiments use."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.is_compressive = config.model == "compressive"
        D = config.d_model
        parts: dict[str, Any] = {
            "d_model": D,
            "self_attn": RelativeMultiHeadAttention(config.n_heads, D, 0.0),
            "feed_forward": FeedForward(D, config.d_ff, 0.0),
            "dropout_prob": 0.0,
        }
        self.src_embed = nn.Embedding(config.n_tokens, D)
        self.transformer: Any
        if self.is_compressive:
            f_c = compressive.Conv1dCompression(config.compression_rate, D)
            layer = compressive.CompressiveTransformerLayer(compress=f_c, **parts)
            self.transformer = compressive.CompressiveTransformer(layer, config.n_layers)
            self.loss = compressive.AttentionReconstructionLoss(self.transformer.layers)
        else:
            self.transformer = xl.TransformerXL(xl.TransformerXLLayer(**parts), config.n_layers)
        self.generator = nn.Linear(D, config.n_tokens)
        for name, parameter in self.named_parameters():  # zeros would hide a wrong position
            if name.endswith(("key_pos_embeddings", "key_pos_bias", "query_pos_bias")):
                nn.init.normal_(parameter, std=0.1)

    def forward(
        self, tokens: Tensor, memory: tuple[LayerTensors, LayerTensors] | None
    ) -> tuple[Tensor, tuple[LayerTensors, LayerTensors], Tensor]:
        """Logits ``[S, B, V]``, the next memory, and the reconstruction loss of ``tokens [S, B]``."""
        mem, c_mem = memory or ([], [])
        S = len(tokens)
        # Of any layer, since all have the same lengths.
        n_past = sum(len(layers[0]) for layers in (mem, c_mem) if layers)
        mask = causal_mask(S, n_past + S, tokens.device)[:, :, None]
        x = self.src_embed(tokens)
        past = (mem, c_mem) if self.is_compressive else (mem,)
        hidden, new_mem = self.transformer(x, *past, mask)
        logits = self.generator(hidden)
        memory, loss = self.remember(append(mem, new_mem), c_mem, new_mem)
        return logits, memory, loss

    def remember(
        self, mem: LayerTensors, c_mem: LayerTensors, new_mem: LayerTensors
    ) -> tuple[tuple[LayerTensors, LayerTensors], Tensor]:
        """The next memory, from ``mem`` with the segment's inputs ``new_mem``, as labml-nn's experiments do
        it; and the reconstruction loss."""
        no_loss = torch.zeros(())
        size = self.config.memory_sizes[0]
        if not self.is_compressive:
            return ([m[-size.mem_len :] for m in mem], []), no_loss
        # The oldest n · c positions become n slots.
        c = size.compression_rate
        n = max(-(-(len(mem[0]) - size.mem_len) // c), 0)
        if not n:
            return (mem, c_mem), no_loss
        old = [m[: n * c] for m in mem]
        mem = [m[n * c :] for m in mem]
        with torch.no_grad():
            new_slots = [layer.compress(m) for layer, m in zip(self.transformer.layers, old, strict=True)]
        c_mem = [slots[-size.c_mem_len :] for slots in append(c_mem, new_slots)]
        return (mem, c_mem), self.loss(new_mem, old)


def append(past: LayerTensors, new: LayerTensors) -> LayerTensors:
    """``new`` after ``past``, by layer; no layers are an empty past."""
    if not past:
        return new
    return [torch.cat(pair) for pair in zip(past, new, strict=True)]


def two_alike(config: ModelConfig) -> tuple[MemoryLM, LabmlLM]:
    """Our model and labml-nn's with the same weights, none of them zero."""
    theirs = LabmlLM(config)
    ours = MemoryLM(config)
    ours.load_state_dict(from_labml(theirs.state_dict(), max_positions=config.longest_attention))
    return ours, theirs


def check_parity(ours: MemoryLM, theirs: LabmlLM, batches: list[Tensor]) -> float:
    """The largest error of logits and reconstruction loss over segments with growing memories, until some are
    compressed, and then of the gradient."""
    errors = {}
    our_memory = None
    their_memory = None
    n_segments = ours.config.memory_sizes[0].mem_len // ours.config.segment_len + 3
    for i in range(n_segments):
        # Only the last segment, with a full memory, has a gradient.
        is_last = i == n_segments - 1
        tokens = batches[i % len(batches)]
        with torch.set_grad_enabled(is_last):
            logits, our_memory, loss = ours(tokens, our_memory)
            their_logits, their_memory, their_loss = theirs(tokens, their_memory)
        errors[f"logits of segment {i}"] = relative_error(logits, their_logits)
        errors[f"reconstruction loss of segment {i}"] = relative_error(loss, their_loss)
        if is_last:
            (cross_entropy(logits, tokens) + loss).backward()
            (cross_entropy(their_logits, tokens) + their_loss).backward()
            errors["gradient"] = relative_error(*two_gradients(ours, theirs))
    for model in (ours, theirs):
        model.zero_grad()
    return check_errors(errors, TOLERANCE, "labml-nn's model")


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def two_gradients(ours: MemoryLM, theirs: LabmlLM) -> tuple[Tensor, Tensor]:
    """The gradients of both models as vectors, in the order of our weights."""
    our_gradients = gradients(ours)
    their_gradients = from_labml(gradients(theirs), max_positions=ours.config.longest_attention)
    our_vector = torch.cat([gradient.flatten() for gradient in our_gradients.values()])
    their_vector = torch.cat([their_gradients[name].flatten() for name in our_gradients])
    return our_vector, their_vector


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of each weight by name; zeros where it has none."""
    by_name = {}
    for name, parameter in model.named_parameters():
        by_name[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return by_name
