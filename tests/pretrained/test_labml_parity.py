"""Ours against labml-nn 0.5.1, from the same weights, in double precision."""

import pytest
import torch
from torch import nn

from experiments.benchmarks.peers import FeedForward as LabmlFeedForward
from experiments.benchmarks.peers import LabmlLM, labml_compressive, labml_xl
from experiments.benchmarks.peers import RelativeMultiHeadAttention as LabmlAttention
from memformers import AttentionReconstructionLoss, from_labml
from memformers.kernels.naive import causal_mask
from memformers.models.language_model import MemoryLM, ModelConfig
from memformers.models.lengths import LayerLengths
from memformers.models.memory import Memory
from memformers.models.remembering import compress_oldest, keep_newest
from tests.builders import fill_zeros, small_compressive, small_xl

pytestmark = pytest.mark.usefixtures("float64")

S, B, D, MEM_LEN, C_MEM_LEN, RATE = 5, 3, 12, 8, 4, 3


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def their_parts():
    parts = {"d_model": D, "dropout_prob": 0.0, "feed_forward": LabmlFeedForward(D, 16, 0.0)}
    return parts | {"self_attn": LabmlAttention(3, D, 0.0)}


def two_xl():
    theirs = fill_zeros(labml_xl.TransformerXL(labml_xl.TransformerXLLayer(**their_parts()), 2))
    ours = small_xl(positions="learned", max_positions=40)
    ours.load_state_dict(from_labml(theirs.state_dict(), max_positions=40))
    return ours, theirs


def two_compressive():
    f_c = labml_compressive.Conv1dCompression(RATE, D)
    layer = labml_compressive.CompressiveTransformerLayer(compress=f_c, **their_parts())
    theirs = fill_zeros(labml_compressive.CompressiveTransformer(layer, 2))
    ours = small_compressive(rate=RATE, positions="learned", max_positions=40)
    ours.load_state_dict(from_labml(theirs.state_dict(), max_positions=40))
    return ours, theirs


def their_mask(past: int):
    return causal_mask(S, past + S, torch.device("cpu"))[:, :, None]


def compare_gradients(ours: nn.Module, theirs: nn.Module):
    """Every parameter's: labml-nn's gradients go through the same map as its weights."""
    theirs_as_ours = from_labml(
        {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in theirs.named_parameters()},
        max_positions=40,
    )
    compared = 0
    for name, parameter in ours.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        close(grad, theirs_as_ours[name])
        compared += bool(grad.abs().sum() > 0)
    return compared


def test_transformer_xl_agrees_over_four_segments_in_outputs_memories_and_gradients():
    ours, theirs = two_xl()
    our_memory, their_mem, our_loss, their_loss = Memory(()), [], 0.0, 0.0
    for _ in range(4):
        x, weight = torch.randn(S, B, D), torch.randn(S, B, D)
        their_output, their_new = theirs(x, their_mem, their_mask(len(their_mem[0]) if their_mem else 0))
        output, new_mem = ours(x, our_memory.mem)
        close(output, their_output)
        close(new_mem, their_new)
        # labml-nn's experiment appends, and keeps the newest.
        grown = (
            [torch.cat(pair) for pair in zip(their_mem, their_new, strict=True)] if their_mem else their_new
        )
        their_mem = [mem[-MEM_LEN:] for mem in grown]
        our_memory = keep_newest(our_memory, new_mem, [LayerLengths(MEM_LEN)] * len(new_mem))
        close(list(our_memory.mem), their_mem)
        our_loss, their_loss = our_loss + (output * weight).sum(), their_loss + (their_output * weight).sum()
    our_loss.backward()
    their_loss.backward()
    assert compare_gradients(ours, theirs) == len(list(ours.parameters()))


def test_compressive_transformer_agrees_over_four_segments_with_its_reconstruction_loss():
    ours, theirs = two_compressive()
    our_aux = AttentionReconstructionLoss(ours.layers)
    their_aux = labml_compressive.AttentionReconstructionLoss(theirs.layers)
    memory, mem, c_mem, our_loss, their_loss, compressions = Memory(()), [], [], 0.0, 0.0, 0
    for _ in range(4):
        x, weight = torch.randn(S, B, D), torch.randn(S, B, D)
        past = sum(len(m[0]) for m in (mem, c_mem) if m)
        their_output, their_new = theirs(x, mem, c_mem, their_mask(past))
        output, new_mem = ours(x, memory.mem, memory.c_mem)
        close(output, their_output)
        close(new_mem, their_new)
        our_loss, their_loss = our_loss + (output * weight).sum(), their_loss + (their_output * weight).sum()

        # labml-nn's experiment, whose module can't be imported: compress what overflows mem_len.
        mem = [torch.cat(pair) for pair in zip(mem, their_new, strict=True)] if mem else their_new
        n = max(-(-(len(mem[0]) - MEM_LEN) // RATE), 0)
        old, mem = [m[: n * RATE] for m in mem], [m[n * RATE :] for m in mem]
        if n:
            their_loss = their_loss + their_aux(their_new, old)
            with torch.no_grad():
                new = [layer.compress(m) for layer, m in zip(theirs.layers, old, strict=True)]
            c_mem = [torch.cat(pair) for pair in zip(c_mem, new, strict=True)] if c_mem else new
            c_mem = [m[-C_MEM_LEN:] for m in c_mem]

        memory, compressed = compress_oldest(
            memory,
            new_mem,
            [layer.compress for layer in ours.layers],
            [LayerLengths(MEM_LEN, C_MEM_LEN, RATE)] * len(new_mem),
        )
        close(list(memory.mem), mem)
        close(list(memory.c_mem), c_mem)
        if compressed:
            compressions += 1
            aux = our_aux(new_mem, compressed.old, compressed.new)
            close(aux, their_aux(their_new, old))
            our_loss = our_loss + aux
    assert compressions == 3
    our_loss.backward()
    their_loss.backward()
    assert compare_gradients(ours, theirs) == len(list(ours.parameters()))


def test_a_labml_language_model_becomes_a_memory_lm():
    config = ModelConfig(
        vocab_size=11, d_model=D, heads=3, n_layers=2, d_ff=16, positions="learned", segment_len=S,
        mem_len=MEM_LEN,
    )  # fmt: skip
    theirs, ours = LabmlLM(config), MemoryLM(config)
    ours.load_state_dict(from_labml(theirs.state_dict(), max_positions=config.longest_attention))
    tokens = torch.randint(0, 11, (S, B))
    close(ours(tokens).logits, theirs(tokens, None)[0])


def test_all_4096_distances_are_taken_over_by_default():
    theirs = LabmlAttention(3, D)
    ours = from_labml({"layers.0.self_attn." + k: v for k, v in theirs.state_dict().items()})
    assert ours["layers.0.self_attn.r"].shape == (3, 4096, 4)


def test_another_models_state_dict_and_too_many_positions_are_errors():
    with pytest.raises(ValueError, match=r"expected .* labml-nn's TransformerXL .* weight, bias"):
        from_labml(nn.Linear(2, 2).state_dict())
    with pytest.raises(ValueError, match="max_positions=5000"):
        from_labml(two_xl()[1].state_dict(), max_positions=5000)
