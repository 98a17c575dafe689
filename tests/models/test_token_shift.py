"""Keys and values of x_j + w ⊙ x_{j−1}, exactly, wherever segments, documents and memories end."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from memformers import Memory, MemoryLayer, MemoryLM, ModelConfig, TransformerXL
from memformers.evaluation.conformance import SMALL
from memformers.models.compression import AttentionReconstructionLoss
from memformers.training.trainer import truncate_to_stage
from tests.builders import fill_zeros
from tests.models.test_contract import CONFIGS, OWN_WAY
from tests.texts import documents, gradients, read, same, tokens

pytestmark = pytest.mark.usefixtures("float64")
XL = {"model": "transformer-xl", "mem_len": (5, 0)}
LEARNED = {"model": "compressive", "positions": "learned", "mem_len": (4, 0), "compression": "dilated"}
BPTT = {"model": "compressive", "c_mem_len": (0, 3), "bptt": 1}


def lm_of(**settings):
    return fill_zeros(MemoryLM(ModelConfig(**{**SMALL, "token_shift": True, **settings}))).eval()


@pytest.mark.parametrize("settings", [XL, LEARNED, BPTT, BPTT | {"bptt": 0, "compression": "mean"}])
@pytest.mark.parametrize("bounded", [False, True])
def test_keys_of_positions_are_the_same_wherever_segments_end(settings, bounded, monkeypatch):
    """Those of the running segment and those in memory; in a layer that remembers no position too."""
    calls, attend = [], MemoryLayer.attend

    def recorded(layer, x, kv_input, *others):
        calls.append((x, kv_input))
        return attend(layer, x, kv_input, *others)

    lm, text = lm_of(**settings), tokens(40)
    monkeypatch.setattr(MemoryLayer, "attend", recorded)
    starts = documents(40, 2, *[(13, 0), (17, 0), (17, 1), (24, 1)] * bounded)
    for lengths in ([6, 6, 6, 6, 6, 6, 4], [1] * 40, [3, 7, 1, 6, 5, 2, 6, 6, 4]):
        calls.clear()
        memory = read(lm, text, starts if bounded else None, lengths=lengths)[2]
        for i, layer in enumerate(lm.transformer.memory_layers):
            x, keys = (torch.cat(parts) for parts in zip(*calls[i::2], strict=True))
            before = F.pad(x[:-1], (0, 0, 0, 0, 1, 0)).masked_fill(starts[..., None], 0.0)
            same([keys], [x + layer.shift.w * before])
            kept = memory.layers[i]
            same([kept.mem, kept.shift_state], [keys[40 - kept.mem_len :], x[-1:]])


@pytest.mark.parametrize("settings", [XL, BPTT, {"model": "transformer"}])
def test_output_and_gradients_are_those_of_projected_shifted_inputs(settings):
    """With the norm folded into the maps, and by the equation: a hook keeps a module from being folded."""
    lm, text, of_both = lm_of(**settings, dropout=0.0).train(), tokens(18), []
    for hooked in (False, True):
        if hooked:
            for layer in lm.transformer.layers:
                layer.self_attn.key.register_forward_hook(lambda *_: None)
        logits, *_ = read(lm, text, through_memory=True)
        loss = logits.square().mean()
        of_both.append([logits, *gradients(lm, loss)])
        assert all(x.any() for x in gradients([layer.shift.w for layer in lm.transformer.layers], loss))
    same(*of_both)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in OWN_WAY])
def test_at_zero_every_model_is_the_model_without_it(name):
    of_both, text, starts = [], tokens(36), torch.rand(36, 2) < 0.1
    for token_shift in (False, True):
        torch.manual_seed(3)
        settings = {**SMALL, **CONFIGS[name], "token_shift": token_shift, "dropout": 0.0}
        lm = MemoryLM(ModelConfig(**settings))
        for layer in lm.transformer.memory_layers if token_shift else ():
            torch.nn.init.zeros_(layer.shift.w)
        logits, losses, memory = read(lm, text, starts)
        of_both.append([logits, *losses, *(layer.mem for layer in memory.layers)])
        shifts = [x for n, x in lm.named_parameters() if n.endswith(".shift.w")]
        assert len(shifts) == 2 * token_shift
    same(*of_both)


def test_a_layer_alone_shifts_as_if_nothing_came_before():
    layer, x = lm_of(model="transformer").transformer.memory_layers[0], torch.randn(6, 2, 12)
    same([layer(x)], [layer(x, kv_input=x + layer.shift.w * F.pad(x[:-1], (0, 0, 0, 0, 1, 0)))])
    assert not torch.equal(layer(x), layer(x, kv_input=x))


def test_a_stack_of_layers_with_and_without_a_shift_keeps_their_newest_input():
    first, second = (lm_of(mem_len=16, token_shift=on).transformer.layers[0] for on in (False, True))
    parts = {"d_model": 12, "self_attn": second.self_attn, "feed_forward": second.feed_forward}
    shifted = MemoryLayer(**parts, dropout_prob=0.0, token_shift=True)
    stack, x = TransformerXL([first, shifted], 2, 16).eval(), torch.randn(16, 2, 12)
    start, memory, _ = stack(x[:7])
    same([torch.cat((start, stack(x[7:], memory)[0]))], [stack(x)[0]])
    mask = torch.ones(6, 6, 1, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="a mask doesn't say where a token shift ends; give doc_starts"):
        stack(x[:6], mask=mask)


@pytest.mark.parametrize("settings", [XL, BPTT, {"model": "compressive", "mem_len": 7}])
def test_the_newest_input_is_joined_checked_and_kept_with_a_memory(settings):
    lm, later = lm_of(**settings), tokens(18, 3)
    memory = read(lm, tokens(36, 3), documents(36, 3, (20, 1), (35, 2)))[2]
    assert [len(layer.shift_state) for layer in memory.layers] == [1, 1]
    joined = Memory.join([memory.streams([0]), memory.streams(slice(1, 3))])
    same([read(lm, later, memory=joined)[0]], [read(lm, later, memory=memory)[0]])
    with pytest.raises(
        ValueError, match="shift_state of layer 0 has length 1, where this model keeps at most 0"
    ):
        lm_of(**settings, token_shift=False)(later, memory)
    with pytest.raises(ValueError, match=r"also needs the newest input of layer 0, its shift_state"):
        lm(later, replace(memory, layers=tuple(replace(x, shift_state=None) for x in memory.layers)))
    half = truncate_to_stage(memory, 0.5, lm.config.memory_sizes)
    assert all(a.shift_state is b.shift_state for a, b in zip(half.layers, memory.layers, strict=True))


def test_the_reconstruction_loss_is_of_shifted_memories_and_teaches_only_the_compression():
    stack = lm_of(model="compressive", mem_len=6, c_mem_len=4).transformer
    memory = Memory()
    for part in torch.randn(4, 6, 2, 12):
        old, (_, memory, loss) = memory, stack(part, memory)
    inputs = []
    hooks = [layer.register_forward_pre_hook(lambda _, x: inputs.append(x[0])) for layer in stack.layers]
    stack(part, old)
    for hook in hooks:
        hook.remove()
    mem = [layer.mem for layer in old.layers]
    c_mem = [rule.f_c(x) for rule, x in zip(stack.rules, mem, strict=True)]
    same([loss], [AttentionReconstructionLoss(stack.layers)(inputs, mem, c_mem)])
    grads = torch.autograd.grad(loss, list(stack.parameters()), allow_unused=True)
    names = [name for name, _ in stack.named_parameters()]
    learned = [name for name, x in zip(names, grads, strict=True) if x is not None]
    assert learned
    assert all(name.startswith("rules.") and ".f_c." in name for name in learned)
