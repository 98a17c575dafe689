"""Linear maps that somebody wrapped, hooked, pruned, parametrized or quantized are called, not read."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

from memformers import CoreConfig, LayerMemory, MemoryCore, RelativeMultiHeadAttention, Stepper
from memformers.evaluation.conformance import SMALL
from memformers.models.fused_norm import attend_with_memory, can_fold
from memformers.models.layers import MemoryLayer
from tests import texts
from tests.builders import fill_zeros
from tests.kernels.against_naive import kept_by
from tests.texts import gradients, same

PLACES = (
    *(f"transformer.layers.0.self_attn.{name}" for name in ("query", "key", "value", "output", "position")),
    "transformer.layers.0.feed_forward.layer1", "transformer.layers.1.feed_forward.layer2", "encode",
)  # fmt: skip
F_C = "transformer.rules.0.f_c.conv"


def test_a_layer_that_was_left_in_training_mode_is_evaluated_without_dropout():
    core = MemoryCore(CoreConfig(d_model=16, n_heads=2, n_layers=1, dropout=0.5)).eval()
    core.transformer.layers[0].train()
    x = torch.randn(1, 16)
    assert torch.equal(*(Stepper(core, 1).step(x) for _ in range(2)))
    assert core.transformer.layers[0].training
    for wrapper, name in ((core.transformer, "MemoryStack"), (torch.compile(core), "OptimizedModule")):
        with pytest.raises(ValueError, match=f"a MemoryLM or a MemoryCore, got a {name}; pass the model in"):
            Stepper(wrapper, 1)


class Reversed(MemoryLayer):
    def attend(self, x, *others):
        return -super().attend(x, *others)


@pytest.mark.parametrize(("kind", "n_heads"), [(Reversed, 2), (MemoryLayer, 4)])
def test_a_layer_that_attends_otherwise_or_has_other_heads_takes_effect_step_by_step(kind, n_heads):
    core = MemoryCore(CoreConfig(d_model=16, n_heads=2, n_layers=1, d_ff=16, segment_len=4, mem_len=4)).eval()
    [old] = core.transformer.layers
    attention = RelativeMultiHeadAttention(n_heads, 16)
    core.transformer.layers[0] = kind(
        d_model=16, self_attn=attention, feed_forward=old.feed_forward, dropout_prob=0.0
    ).eval()
    x, stepper = torch.randn(8, 2, 16), Stepper(core, 2)
    whole = core(x[4:], core(x[:4]).memory).output
    torch.testing.assert_close(stepper.read(x)[4:], whole)


@pytest.fixture(autouse=True)
def _without_warnings_and_global_hooks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    nn.modules.module._global_forward_hooks.clear()


class LoRA(nn.Module):
    """A linear map and a narrow one beside it, which counts its calls."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0
        self.down = nn.Linear(inner.in_features, 2, bias=False)
        self.up = nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x):
        self.calls += 1
        return self.inner(x) + self.up(self.down(x))


def core_of(model="transformer-xl", **changes):
    settings = {name: x for name, x in SMALL.items() if name != "vocab_size"}
    return fill_zeros(MemoryCore(CoreConfig(**{**settings, "model": model, "d_input": 5, **changes})))


def replaced(core, place, build):
    """``build`` takes the place of a module, if it returns one."""
    owner, _, name = place.rpartition(".")
    made = build(core.get_submodule(place))
    if isinstance(made, nn.Module):
        setattr(core.get_submodule(owner), name, made)
    return core.get_submodule(place)


def read(core, x):
    outputs, losses, _ = texts.read(core, x, lengths=6, through_memory=True)
    return outputs, sum(losses)


def hooked(module):
    module.register_forward_hook(lambda _, __, output: 2 * output)


def hooked_with_all(module):
    def double(other, _, output):
        return 2 * output if other is module else None

    nn.modules.module.register_module_forward_hook(double)


def replaced_forward(module):
    """As accelerate's hooks do."""
    forward = module.forward
    module.forward = lambda x: 2 * forward(x)


def pruned(module):
    prune.random_unstructured(module, "weight", 0.5)


def halved(module):
    class Half(nn.Module):
        def forward(self, weight):
            return weight / 2

    nn.utils.parametrize.register_parametrization(module, "weight", Half())


CHANGES = {
    "LoRA": LoRA, "forward hook": hooked, "forward of its own": replaced_forward, "pruned": pruned,
    "hook of all modules": hooked_with_all, "old weight norm": weight_norm,
    "weight norm": parametrizations.weight_norm, "parametrized": halved,
}  # fmt: skip


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("place", "change"),
    [*((place, "LoRA") for place in PLACES), *zip(PLACES, [*CHANGES][1:] * 2, strict=False),
     ("transformer.layers.1.self_attn", "forward hook")],
)  # fmt: skip
def test_a_changed_map_is_called_in_every_segment_and_its_gradient_is_that_of_one_pass(place, change):
    core, x = core_of(mem_len=18, segment_len=18), torch.randn(18, 2, 5)
    plain = read(core, x)[0]
    changed = replaced(core, place, CHANGES[change])
    got, wanted = read(core, x)[0], core(x).output
    same([got, *gradients(core, got.sin().sum())], [wanted, *gradients(core, wanted.sin().sum())])
    assert torch.allclose(got, plain) == (change in ("old weight norm", "weight norm"))
    assert all(grad.any() for grad in gradients(list(changed.parameters()), got.sin().sum()))
    assert change != "LoRA" or changed.calls == 3 + 1
    stepper = Stepper(core.eval(), 2)
    same([torch.cat([stepper.read(part) for part in x.split(5)])], [wanted])
    memory = None
    for part in x.split(6):  # a training without gradient through memory, in which no graph is used twice
        output, memory, _ = core(part, memory)
        output.sin().sum().backward()


@pytest.mark.parametrize("place", [*PLACES, F_C])
def test_hooks_of_both_passes_are_called_once_a_segment(place):
    core, calls, memory = core_of("compressive" if place == F_C else "transformer-xl"), [], None
    core.get_submodule(place).register_forward_hook(lambda *_: calls.append(1))
    core.get_submodule(place).register_full_backward_hook(lambda *_: calls.append(1))
    for part in torch.randn(24, 2, 5).split(6):
        output, memory, loss = core(part, memory)
        (output.square().sum() + loss).backward()
    assert len(calls) == 2 * (3 if place == F_C else 4)  # the first segment compresses nothing


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("compression", ["conv", "dilated"])
@pytest.mark.parametrize("change", [name for name in CHANGES if name != "LoRA"])
def test_a_changed_convolution_of_a_compression_is_called_and_learns(compression, change):
    core, x = core_of("compressive", compression=compression), torch.randn(24, 2, 5)
    plain, _ = read(core, x)
    place = F_C if compression == "conv" else "transformer.rules.0.f_c.dilated.1"
    changed = replaced(core, place, CHANGES[change])
    output, loss = read(core, x)
    assert torch.allclose(output, plain) == (change in ("old weight norm", "weight norm"))
    assert all(grad.any() for grad in gradients(list(changed.parameters()), loss))


@torch.no_grad()
def test_a_model_whose_linear_maps_are_all_quantized_reads_compresses_and_reads_step_by_step():
    core, x = core_of("compressive").eval(), torch.randn(24, 2, 5)
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(core), {nn.Linear})
    replaced(quantized, F_C, lambda conv: nn.Sequential(conv))
    output, plain = read(quantized, x), read(core, x)
    torch.testing.assert_close(output, plain, rtol=0, atol=0.5)
    assert not torch.equal(output[0], plain[0])
    stepper = Stepper(quantized, 2)
    steps = torch.stack([stepper.step(one) for one in x])
    torch.testing.assert_close(steps, plain[0], rtol=0, atol=0.5)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("S", "M"), [(3, 4), (1, 1), (2, 9)])
def test_maps_that_are_folded_into_a_norm_give_what_the_modules_give(norm, positions, bias, S, M):
    """The output and every gradient, with keys that some queries don't see."""
    attention = fill_zeros(RelativeMultiHeadAttention(3, 12, 0.0, positions=positions))
    attention.query = nn.Linear(12, 12, bias=bias)
    norm = fill_zeros(nn.LayerNorm(12)) if norm else None
    assert can_fold(attention, norm)
    x, past = torch.randn(S, 2, 12, requires_grad=True), torch.randn(M, 2, 12, requires_grad=True)
    key_start = torch.randint(0, M + 1, (2, S))
    context = torch.cat((past, x)) if norm is None else norm(torch.cat((past, x)))
    plain = attention(query=context[M:], key=context, value=context, key_start=key_start)
    folded = attend_with_memory(attention, norm, x, x, past, key_start)
    learning = [x, past, *attention.parameters(), *(norm.parameters() if norm else ())]
    weight = torch.randn_like(plain)
    same(*([y, *gradients(learning, (y * weight).sum())] for y in (plain, folded)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("B", [1, 78, 79])
@pytest.mark.parametrize("has_grad", [True, False])
def test_a_layer_attends_alike_to_few_keys_and_many(B, has_grad):
    """On both sides of the 1,024 keys of all streams from which weights are folded: 78 and 79 times 13."""
    attention = fill_zeros(RelativeMultiHeadAttention(3, 12, 0.0))
    layer = MemoryLayer(d_model=12, self_attn=attention, feed_forward=nn.Identity(), dropout_prob=0.0)
    fill_zeros(layer.norm_self_attn)
    x, mem, slots = (torch.randn(n, B, 12, requires_grad=True) for n in (4, 7, 2))
    with torch.set_grad_enabled(has_grad):
        y = layer.attend(x, x, LayerMemory(mem, slots), None, None)
        z = layer.norm_self_attn(torch.cat((slots, mem, x)))
        expected = attention(query=z[9:], key=z, value=z)
    if not has_grad:
        same([y], [expected])
        return
    learning = [x, mem, slots, *attention.parameters(), *layer.norm_self_attn.parameters()]
    weight = torch.randn_like(y)
    same(*([out, *gradients(learning, (out * weight).sum())] for out in (y, expected)))


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_layers_that_are_computed_again_keep_less_and_get_tensors_by_position(model, monkeypatch):
    from memformers.models import stack

    named, real = [], stack.checkpoint
    monkeypatch.setattr(stack, "checkpoint", lambda *a, **k: named.extend(k.values()) or real(*a, **k))
    core, x, of_both = core_of(model, dropout=0.5).train(), torch.randn(18, 2, 5), []
    for recompute in (False, True):
        core.transformer.activation_checkpointing = recompute
        torch.manual_seed(3)
        kept, output = kept_by(lambda: read(core, x)[0])
        of_both.append((sum(map(torch.numel, kept)), output, gradients(core, output.square().sum())))
    (before, *plain), (after, *again) = of_both
    assert after < before / 2
    torch.testing.assert_close(again, plain)
    assert named
    assert not any(isinstance(x, torch.Tensor) for x in named)
