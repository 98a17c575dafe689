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
    """A model with a token shift in eval mode in which no weight is zero."""
    return fill_zeros(MemoryLM(ModelConfig(**{**SMALL, "token_shift": True, **settings}))).eval()


@pytest.mark.parametrize("settings", [XL, LEARNED, BPTT, BPTT | {"bptt": 0, "compression": "mean"}])
@pytest.mark.parametrize("bounded", [False, True])
def test_keys_of_positions_are_the_same_wherever_segments_end(settings, bounded, monkeypatch):
    """Those of the running segment and those in memory; in a layer that remembers no position too."""
    calls = []
    attend = MemoryLayer.attend

    def recorded(layer, x, kv_input, *arguments):
        calls.append((x, kv_input))
        return attend(layer, x, kv_input, *arguments)

    lm = lm_of(**settings)
    text = tokens(40)
    monkeypatch.setattr(MemoryLayer, "attend", recorded)
    starts = documents(40, 2, (13, 0), (17, 0), (17, 1), (24, 1)) if bounded else documents(40, 2)
    for lengths in ([6, 6, 6, 6, 6, 6, 4], [1] * 40, [3, 7, 1, 6, 5, 2, 6, 6, 4]):
        calls.clear()
        _, _, memory = read(lm, text, starts if bounded else None, lengths=lengths)
        for i, layer in enumerate(lm.transformer.memory_layers):
            x, keys = (torch.cat(parts) for parts in zip(*calls[i::2], strict=True))
            predecessors = shift_right(x).masked_fill(starts[..., None], 0.0)
            same([keys], [x + layer.shift.w * predecessors])
            remembered = memory.layers[i]
            newest = keys[40 - remembered.mem_len :]
            same([remembered.mem, remembered.shift_state], [newest, x[-1:]])


def shift_right(x):
    """x_{j−1} of each position of ``x [S, B, D]``; zeros for the first."""
    return F.pad(x[:-1], (0, 0, 0, 0, 1, 0))


@pytest.mark.parametrize("settings", [XL, BPTT, {"model": "transformer"}])
def test_results_are_those_of_projected_shifted_inputs(settings):
    """With the norm folded into the maps, and by the equation: a hook keeps a module from being folded."""
    lm = lm_of(**settings, dropout=0.0).train()
    text = tokens(18)
    shift_weights = [layer.shift.w for layer in lm.transformer.layers]

    def compute():
        logits, *_ = read(lm, text, through_memory=True)
        loss = logits.square().mean()
        assert all(grad.any() for grad in gradients(shift_weights, loss))
        return [logits, *gradients(lm, loss)]

    folded = compute()
    for layer in lm.transformer.layers:
        layer.self_attn.key.register_forward_hook(lambda *_: None)
    same(folded, compute())


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in OWN_WAY])
def test_at_zero_every_model_is_the_model_without_it(name):
    text = tokens(36)
    doc_starts = torch.rand(36, 2) < 0.1

    def lm_with(token_shift):
        torch.manual_seed(3)
        settings = {**SMALL, **CONFIGS[name], "token_shift": token_shift, "dropout": 0.0}
        return MemoryLM(ModelConfig(**settings))

    def compute(lm):
        logits, losses, memory = read(lm, text, doc_starts)
        return [logits, *losses, *(layer.mem for layer in memory.layers)]

    with_shift = lm_with(token_shift=True)
    for layer in with_shift.transformer.memory_layers:
        torch.nn.init.zeros_(layer.shift.w)
    without = lm_with(token_shift=False)
    n_more = len(list(with_shift.parameters())) - len(list(without.parameters()))
    assert n_more == 2
    same(compute(with_shift), compute(without))


def test_a_layer_alone_shifts_as_if_nothing_came_before():
    layer = lm_of(model="transformer").transformer.memory_layers[0]
    x = torch.randn(6, 2, 12)
    same([layer(x)], [layer(x, kv_input=x + layer.shift.w * shift_right(x))])
    assert not torch.equal(layer(x), layer(x, kv_input=x))


def mixed_stack():
    """A layer without a shift, and one with it."""
    plain = lm_of(mem_len=16, token_shift=False).transformer.layers[0]
    other = lm_of(mem_len=16).transformer.layers[0]
    parts = {"d_model": 12, "self_attn": other.self_attn, "feed_forward": other.feed_forward}
    shifted = MemoryLayer(**parts, dropout_prob=0.0, token_shift=True)
    return TransformerXL([plain, shifted], 2, 16).eval()


def test_layers_with_and_without_a_shift_keep_their_newest_input():
    stack = mixed_stack()
    x = torch.randn(16, 2, 12)
    first, memory, _ = stack(x[:7])
    second, *_ = stack(x[7:], memory)
    of_one_pass, *_ = stack(x)
    same([torch.cat((first, second))], [of_one_pass])


def test_a_stack_with_a_shift_refuses_a_mask():
    stack = mixed_stack()
    x = torch.randn(6, 2, 12)
    mask = torch.ones(6, 6, 1, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="a mask doesn't say where a token shift ends; give doc_starts"):
        stack(x, mask=mask)


@pytest.mark.parametrize("settings", [XL, BPTT, {"model": "compressive", "mem_len": 7}])
def test_the_newest_input_is_joined_checked_and_kept_with_a_memory(settings):
    lm = lm_of(**settings)
    _, _, memory = read(lm, tokens(36, 3), documents(36, 3, (20, 1), (35, 2)))
    assert [len(layer.shift_state) for layer in memory.layers] == [1, 1]

    text = tokens(18, 3)
    joined = Memory.join([memory.streams([0]), memory.streams(slice(1, 3))])
    logits, *_ = read(lm, text, memory=joined)
    wanted, *_ = read(lm, text, memory=memory)
    same([logits], [wanted])

    message = "shift_state of layer 0 has length 1, where this model keeps at most 0"
    with pytest.raises(ValueError, match=message):
        lm_of(**settings, token_shift=False)(text, memory)
    without = tuple(replace(layer, shift_state=None) for layer in memory.layers)
    with pytest.raises(ValueError, match=r"also needs the newest input of layer 0, its shift_state"):
        lm(text, replace(memory, layers=without))

    half = truncate_to_stage(memory, 0.5, lm.config.memory_sizes)
    for truncated, layer in zip(half.layers, memory.layers, strict=True):
        assert truncated.shift_state is layer.shift_state


def test_the_reconstruction_loss_is_of_shifted_memories():
    """And teaches only the compression."""
    stack = lm_of(model="compressive", mem_len=6, c_mem_len=4).transformer
    *past_segments, segment = torch.randn(4, 6, 2, 12)
    memory = Memory()
    for part in past_segments:
        _, memory, _ = stack(part, memory)

    inputs = []
    hooks = []
    for layer in stack.layers:
        hooks.append(layer.register_forward_pre_hook(lambda _, x: inputs.append(x[0])))
    _, _, loss = stack(segment, memory)
    for hook in hooks:
        hook.remove()
    mem = [layer.mem for layer in memory.layers]
    c_mem = [rule.f_c(x) for rule, x in zip(stack.rules, mem, strict=True)]
    same([loss], [AttentionReconstructionLoss(stack.layers)(inputs, mem, c_mem)])

    learned = []
    grads = torch.autograd.grad(loss, list(stack.parameters()), allow_unused=True)
    for (name, _), grad in zip(stack.named_parameters(), grads, strict=True):
        if grad is not None:
            learned.append(name)
    assert learned
    assert all(name.startswith("rules.") and ".f_c." in name for name in learned)
