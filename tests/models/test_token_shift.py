"""Keys and values of m_j = z_j + w ⊙ z_{j−1}, exactly, wherever segments, documents and memories end."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from memformers import Memory, MemoryLM, ModelConfig, Stepper
from memformers.evaluation.conformance import SMALL, assert_conforms
from memformers.training.loop import shortened
from tests.builders import fill_zeros
from tests.models.test_contract import CONFIGS
from tests.texts import documents, kept, read, same, tokens

XL = {"model": "transformer-xl", "mem_len": (5, 0)}
LEARNED = {"model": "compressive", "positions": "learned", "mem_len": (4, 0), "compression": "dilated"}
BPTT = {"model": "compressive", "c_mem_len": (0, 3), "bptt": 1}


def lm_of(**settings):
    return fill_zeros(MemoryLM(ModelConfig(**{**SMALL, "token_shift": True, **settings}))).double().eval()


def shifted_by_hand(lm, layer, inputs, starts):
    """m of all positions of a text from the layer's inputs ``[T, B, D]``."""
    z = layer.attention_input(inputs)
    before = F.pad(z[:-1], (0, 0, 0, 0, 1, 0)).masked_fill(starts[..., None], 0.0)
    return z + layer.shift * before


@contextmanager
def recorded(modules, pick):
    """What ``pick`` takes of the arguments of each module's calls."""
    found = []
    hooks = [
        m.register_forward_pre_hook(
            lambda _, args, kwargs: found.append(pick(args, kwargs)), with_kwargs=True
        )
        for m in modules
    ]
    yield found
    for hook in hooks:
        hook.remove()


def seen(_, kwargs):
    return kwargs["key"], kwargs["key_start"]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("settings", [XL, LEARNED, BPTT, BPTT | {"bptt": 0, "compression": "mean"}])
@pytest.mark.parametrize("bounded", [False, True])
def test_keys_of_positions_are_the_same_wherever_segments_end(settings, bounded):
    """Of all positions that a query may see, those at the end of a memory and of none too."""
    lm, text = lm_of(**settings), tokens(40)
    starts = documents(40, 2, (13, 0), (17, 0), (17, 1), (24, 1)) if bounded else documents(40, 2)
    layers = lm.transformer.memory_layers
    for lengths in ([6, 6, 6, 6, 6, 6, 4], [1] * 40, [3, 7, 1, 6, 5, 2, 6, 6, 4]):
        memory, keys, inputs, sizes = None, [], [], []
        attentions = [layer.self_attn for layer in layers]
        for part, start in zip(text.split(lengths), starts.split(lengths), strict=True):
            sizes.append([len(x) for x in memory.mem] if memory else [0, 0])
            with (
                recorded(layers, lambda args, _: args[0]) as read_inputs,
                recorded(attentions, seen) as read_keys,
            ):
                memory = lm(part, memory, doc_starts=start if bounded else None).memory
            inputs.append(read_inputs)
            keys.append(read_keys)
        for i, layer in enumerate(layers):
            whole, end = shifted_by_hand(lm, layer, torch.cat([of[i] for of in inputs]), starts), 0
            for n, read_keys, M in zip(lengths, keys, sizes, strict=True):
                key, key_start = read_keys[i]
                end, length = end + n, M[i] + n
                hidden = torch.zeros(2, dtype=torch.int64) if key_start is None else key_start[:, 0]
                for b in range(2):
                    visible = min(length, len(key) - int(hidden[b]))
                    same([key[-visible:, b]], [whole[end - visible : end, b]])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("switched", ["on", "at zero"])
def test_every_model_conforms_with_it_and_at_zero_is_the_model_without_it(name, switched):
    if name == "infini":
        with pytest.raises(ValueError, match="attends in its own way; use token_shift=False"):
            MemoryLM(ModelConfig(**{**SMALL, **CONFIGS[name], "token_shift": True}))
    elif switched == "on":
        assert_conforms(**CONFIGS[name] | {"token_shift": True})
    else:
        found, text, starts = [], tokens(36), torch.rand(36, 2) < 0.1
        for token_shift in (False, True):
            torch.manual_seed(3)
            lm = MemoryLM(
                ModelConfig(**{**SMALL, **CONFIGS[name], "token_shift": token_shift, "dropout": 0.0})
            )
            torch.manual_seed(4)
            logits, losses, memory = read(lm, text, starts)
            found.append([logits, *losses, *memory.mem])
            shifts = [x for n, x in lm.named_parameters() if n.endswith(".shift")]
            assert len(shifts) == 2 * token_shift
            assert not any(x.any() for x in shifts)
        same(*found)


@pytest.mark.usefixtures("float64")
def test_one_pass_with_a_mask_equals_segments_and_nothing_of_a_hidden_position_is_read():
    lm, S, M = lm_of(model="transformer-xl", mem_len=8), 6, 8
    x, at = torch.randn(24, 2, 12), torch.arange(24)
    begins = at // S * S - M
    visible = (at[None] <= at[:, None]) & (at[None] >= begins[:, None])
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


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("settings", [XL, BPTT, {"model": "compressive", "mem_len": 7}])
def test_a_memory_with_the_vector_before_it_is_a_value(tmp_path, settings):
    """It is saved, joined, reset, cut short and given to a stepper."""
    lm = lm_of(**settings)
    text, later = tokens(36, 3), tokens(18, 3)
    starts = documents(36, 3, (20, 1), (35, 2))
    memory = read(lm, text, starts)[2]
    assert [len(x) for x in memory.before] == [1, 1]
    memory.save(tmp_path / "memory")
    assert Memory.load(tmp_path / "memory") == memory
    joined = Memory.join([memory.streams([0]), memory.streams(slice(1, 3))])
    wanted = read(lm, later, memory=memory)
    for other in (Memory.load(tmp_path / "memory"), joined):
        same([read(lm, later, memory=other)[0]], [wanted[0]])
    stepper = Stepper(lm, 3, memory)
    steps = torch.stack([stepper.read(token)[-1] for token in later.split(1)])
    same([steps, *kept(stepper.memory())], [wanted[0], *kept(wanted[2])])
    reset = read(lm, later, memory=memory.reset(torch.tensor([True, False, True])))[0]
    same([reset[:6, 0::2], reset[:, 1]], [lm(later[:6, 0::2]).logits, wanted[0][:, 1]])
    with pytest.raises(ValueError, match="before has length 1 in layer 0, where this model keeps at most 0"):
        lm_of(**settings, token_shift=False)(later, memory)
    half = shortened(memory, 0.5, lm.config.memory_sizes)
    same([half.before[0]], [memory.mem[0][len(memory.mem[0]) - len(half.mem[0]) - 1 :][:1]])


@pytest.mark.usefixtures("float64")
def test_the_reconstruction_loss_compares_with_the_keys_that_queries_see():
    stack = lm_of(model="compressive").transformer
    memory = None
    for part in torch.randn(4, 6, 2, 12):
        _, after, loss = stack(part, memory)
        memory, old = after, memory
    assert old is not None
    torch.nn.init.zeros_(stack.memory_layers[0].shift)
    torch.nn.init.zeros_(stack.memory_layers[1].shift)
    assert stack(part, old)[2] != loss
    grads = torch.autograd.grad(loss, list(stack.parameters()), allow_unused=True)
    learned = {
        name for (name, _), grad in zip(stack.named_parameters(), grads, strict=True) if grad is not None
    }
    assert {name.split(".")[2] for name in learned} == {"compress"}
