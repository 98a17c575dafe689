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
TOLERANCE = 1e-4  # the largest relative RMS error of a whole model in float32


class LabmlLM(nn.Module):
    """labml-nn's model with the embedding, head and memory rules of its own experiments."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        D, n_heads = config.d_model, config.n_heads
        parts: dict[str, Any] = {
            "d_model": D, "self_attn": RelativeMultiHeadAttention(n_heads, D, 0.0),
            "feed_forward": FeedForward(D, config.d_ff, 0.0), "dropout_prob": 0.0,
        }  # fmt: skip
        self.src_embed = nn.Embedding(config.n_tokens, D)
        self.transformer: Any
        if config.model == "compressive":
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

    def forward(self, tokens: Tensor, memory: Any) -> tuple[Tensor, Any, Tensor]:
        mem, c_mem = memory or (list[Tensor](), list[Tensor]())
        S, past = len(tokens), sum(map(len, (*mem[:1], *c_mem[:1])))
        mask = causal_mask(S, past + S, tokens.device)[:, :, None]
        x, no_loss = self.src_embed(tokens), torch.zeros(())
        lengths, is_compressive = self.config.memory_sizes[0], self.config.model == "compressive"
        hidden, new_mem = self.transformer(x, *((mem, c_mem) if is_compressive else (mem,)), mask)
        logits, mem = self.generator(hidden), joined(mem, new_mem)
        if not is_compressive:
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
    return [torch.cat(pair) for pair in zip(kept, new, strict=True)] if kept else new


def two_alike(config: ModelConfig) -> tuple[MemoryLM, LabmlLM]:
    """Our model and labml-nn's with the same weights, none of them zero."""
    theirs, ours = LabmlLM(config), MemoryLM(config)
    ours.load_state_dict(from_labml(theirs.state_dict(), max_positions=config.longest_attention))
    return ours, theirs


def check_parity(ours: MemoryLM, theirs: LabmlLM, batches: list[Tensor]) -> float:
    """The largest error of logits and reconstruction loss over segments with growing memories, until some are
    compressed, and then of the gradient."""
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
    for model in (ours, theirs):
        model.zero_grad()
    return check_errors(errors, TOLERANCE, "labml-nn's model")


def two_gradients(ours: MemoryLM, theirs: LabmlLM) -> tuple[Tensor, Tensor]:
    a, b = gradients(ours), from_labml(gradients(theirs), max_positions=ours.config.longest_attention)
    return torch.cat([x.flatten() for x in a.values()]), torch.cat([b[name].flatten() for name in a])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
