"""Keys and values of m_j = z_j + w ⊙ z_{j−1}, exactly, wherever segments, documents and memories end."""

import pytest
import torch
import torch.nn.functional as F

from memformers import Memory, MemoryLM, ModelConfig
from memformers.evaluation.conformance import SMALL
from memformers.models.layers import MemoryLayer
from memformers.training.loop import shortened
from tests.builders import fill_zeros
from tests.models.test_contract import CONFIGS
from tests.texts import documents, read, same, tokens

pytestmark = pytest.mark.usefixtures("float64")
XL = {"model": "transformer-xl", "mem_len": (5, 0)}
LEARNED = {"model": "compressive", "positions": "learned", "mem_len": (4, 0), "compression": "dilated"}
BPTT = {"model": "compressive", "c_mem_len": (0, 3), "bptt": 1}


def lm_of(**settings):
    return fill_zeros(MemoryLM(ModelConfig(**{**SMALL, "token_shift": True, **settings}))).eval()


@pytest.mark.parametrize("settings", [XL, LEARNED, BPTT, BPTT | {"bptt": 0, "compression": "mean"}])
@pytest.mark.parametrize("bounded", [False, True])
def test_keys_of_positions_are_the_same_wherever_segments_end(settings, bounded, monkeypatch):
    """Of all positions that a query may see, those at the end of a memory and of none too."""
    calls, attention_inputs = [], MemoryLayer.attention_inputs

    def recorded(layer, x, *past, **shift):
        query, key = attention_inputs(layer, x, *past, **shift)
        calls.append((layer, x, key))
        return query, key

    lm, text = lm_of(**settings), tokens(40)
    layers = lm.transformer.memory_layers
    monkeypatch.setattr(MemoryLayer, "attention_inputs", recorded)
    starts = documents(40, 2, *[(13, 0), (17, 0), (17, 1), (24, 1)] * bounded)
    for lengths in ([6, 6, 6, 6, 6, 6, 4], [1] * 40, [3, 7, 1, 6, 5, 2, 6, 6, 4]):
        memory, passes = Memory(), []
        for part, start in zip(text.split(lengths), starts.split(lengths), strict=True):
            memory = memory.reset(start[0]) if bounded else memory
            first = lm.transformer.first_visible_keys(part, memory, start if bounded else None)
            sizes, calls[:] = memory.lengths(len(layers)), []
            memory = lm(part, memory, doc_starts=start if bounded else None).memory
            passes.append([(M, k, *call) for (M, _), k, call in zip(sizes, first, calls, strict=False)])
        for by_segment in zip(*passes, strict=True):
            layer = by_segment[0][2]
            z, end = layer.attention_input(torch.cat([x for *_, x, _ in by_segment])), 0
            before = F.pad(z[:-1], (0, 0, 0, 0, 1, 0)).masked_fill(starts[..., None], 0.0)
            whole = z + layer.shift * before
            for M, key_start, of, x, key in by_segment:
                assert of is layer
                end += len(x)
                for b in range(2):
                    hidden = 0 if key_start is None else int(key_start[b, 0])
                    visible = min(M + len(x), len(key) - hidden)
                    same([key[-visible:, b]], [whole[end - visible : end, b]])


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "infini"])
def test_at_zero_every_model_is_the_model_without_it(name):
    found, text, starts = [], tokens(36), torch.rand(36, 2) < 0.1
    for token_shift in (False, True):
        torch.manual_seed(3)
        settings = {**SMALL, **CONFIGS[name], "token_shift": token_shift, "dropout": 0.0}
        lm = MemoryLM(ModelConfig(**settings))
        logits, losses, memory = read(lm, text, starts)
        found.append([logits, *losses, *memory.mem])
        shifts = [x for n, x in lm.named_parameters() if n.endswith(".shift")]
        assert len(shifts) == 2 * token_shift
        assert not any(x.any() for x in shifts)
    same(*found)


def test_one_pass_with_a_mask_equals_segments_and_nothing_of_a_hidden_position_is_read():
    lm, S, M = lm_of(model="transformer-xl", mem_len=8), 6, 8
    x, at = torch.randn(24, 2, 12), torch.arange(24)
    visible = (at[None] <= at[:, None]) & (at[None] >= (at // S * S - M)[:, None])
    whole, _, _ = lm.transformer(x, mask=visible[:, :, None])
    memory, parts = None, []
    for part in x.split(S):
        output, memory, _ = lm.transformer(part, memory)
        parts.append(output)
    same([torch.cat(parts)], [whole])
    changed, padding = x.clone(), visible & ((at >= 3)[None] | (at < 3)[:, None])
    changed[:3] = torch.randn(3, 2, 12)
    outputs = [lm.transformer(y, mask=padding[:, :, None])[0][3:] for y in (x, changed)]
    same([outputs[0]], [outputs[1]])


@pytest.mark.parametrize("settings", [XL, BPTT, {"model": "compressive", "mem_len": 7}])
def test_the_vector_before_a_memory_is_joined_checked_and_cut_with_it(settings):
    lm, later = lm_of(**settings), tokens(18, 3)
    memory = read(lm, tokens(36, 3), documents(36, 3, (20, 1), (35, 2)))[2]
    assert [len(x) for x in memory.before] == [1, 1]
    joined = Memory.join([memory.streams([0]), memory.streams(slice(1, 3))])
    same([read(lm, later, memory=joined)[0]], [read(lm, later, memory=memory)[0]])
    with pytest.raises(ValueError, match="before has length 1 in layer 0, where this model keeps at most 0"):
        lm_of(**settings, token_shift=False)(later, memory)
    half = shortened(memory, 0.5, lm.config.memory_sizes)
    same([half.before[0]], [memory.mem[0][len(memory.mem[0]) - len(half.mem[0]) - 1 :][:1]])


def test_the_reconstruction_loss_compares_with_the_keys_that_queries_see():
    stack = lm_of(model="compressive").transformer
    memory = Memory()
    for part in torch.randn(4, 6, 2, 12):
        old, (_, memory, loss) = memory, stack(part, memory)
    for layer in stack.memory_layers:
        torch.nn.init.zeros_(layer.shift)
    assert stack(part, old)[2] != loss
    grads = torch.autograd.grad(loss, list(stack.parameters()), allow_unused=True)
    names = [name for name, _ in stack.named_parameters()]
    learned = {name.split(".")[2] for name, x in zip(names, grads, strict=True) if x is not None}
    assert learned == {"compress"}
