"""Linear maps that somebody wrapped, hooked, pruned, parametrized or quantized are called, not read."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

from memformers import CoreConfig, MemoryCore, RelativeMultiHeadAttention, Stepper
from memformers.evaluation.conformance import SMALL
from memformers.models import stack as stack_module
from memformers.models.fused_norm import attend_with_memory, can_fold
from memformers.models.layers import MemoryLayer
from tests import texts
from tests.builders import fill_zeros
from tests.kernels.against_naive import kept_by
from tests.texts import gradients, same

# Linear maps of a core.
MAPS = (
    "transformer.layers.0.self_attn.query",
    "transformer.layers.0.self_attn.key",
    "transformer.layers.0.self_attn.value",
    "transformer.layers.0.self_attn.output",
    "transformer.layers.0.self_attn.position",
    "transformer.layers.0.feed_forward.layer1",
    "transformer.layers.1.feed_forward.layer2",
    "encode",
)
F_C = "transformer.rules.0.f_c.conv"


def test_a_layer_in_training_mode_is_stepped_without_dropout():
    core = MemoryCore(CoreConfig(d_model=16, n_heads=2, n_layers=1, dropout=0.5)).eval()
    core.transformer.layers[0].train()
    x = torch.randn(1, 16)
    assert torch.equal(Stepper(core, 1).step(x), Stepper(core, 1).step(x))
    assert core.transformer.layers[0].training


def test_a_stepper_refuses_what_is_around_a_model_or_in_it():
    core = MemoryCore(CoreConfig(d_model=16, n_heads=2, n_layers=1))
    for wrapper, name in ((core.transformer, "MemoryStack"), (torch.compile(core), "OptimizedModule")):
        with pytest.raises(ValueError, match=f"a MemoryLM or a MemoryCore, got a {name}; pass the model in"):
            Stepper(wrapper, 1)


class Reversed(MemoryLayer):
    def attend(self, *inputs):
        return -super().attend(*inputs)


@pytest.mark.parametrize(("kind", "n_heads"), [(Reversed, 2), (MemoryLayer, 4)])
def test_another_layer_or_other_heads_take_effect_in_a_step(kind, n_heads):
    core = MemoryCore(CoreConfig(d_model=16, n_heads=2, n_layers=1, d_ff=16, segment_len=4, mem_len=4)).eval()
    [old] = core.transformer.layers
    attention = RelativeMultiHeadAttention(n_heads, 16)
    core.transformer.layers[0] = kind(
        d_model=16, self_attn=attention, feed_forward=old.feed_forward, dropout_prob=0.0
    ).eval()
    x = torch.randn(8, 2, 16)
    wanted = core(x[4:], core(x[:4]).memory).output
    torch.testing.assert_close(Stepper(core, 2).read(x)[4:], wanted)


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
        self.inner = inner
        self.n_calls = 0
        self.down = nn.Linear(inner.in_features, 2, bias=False)
        self.up = nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x):
        self.n_calls += 1
        return self.inner(x) + self.up(self.down(x))


def core_of(model="transformer-xl", **changes):
    settings = {name: x for name, x in SMALL.items() if name != "vocab_size"}
    return fill_zeros(MemoryCore(CoreConfig(**{**settings, "model": model, "d_input": 5, **changes})))


def change_module(core, path, change):
    """Change a module in place, or put what ``change`` returns in its place; returns what is there then."""
    owner, _, name = path.rpartition(".")
    replacement = change(core.get_submodule(path))
    if isinstance(replacement, nn.Module):
        setattr(core.get_submodule(owner), name, replacement)
    return core.get_submodule(path)


def read(core, x):
    outputs, losses, _ = texts.read(core, x, lengths=6, through_memory=True)
    return outputs, sum(losses)


def hooked(module):
    module.register_forward_hook(lambda _, __, output: 2 * output)


def hooked_with_all(module):
    def double(called, _, output):
        return 2 * output if called is module else None

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
    "LoRA": LoRA, "forward hook": hooked, "replaced forward": replaced_forward, "pruned": pruned,
    "hook of all modules": hooked_with_all, "old weight norm": weight_norm,
    "weight norm": parametrizations.weight_norm, "parametrized": halved,
}  # fmt: skip


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("path", "change"),
    [*((path, "LoRA") for path in MAPS), *zip(MAPS, [*CHANGES][1:] * 2, strict=False),
     ("transformer.layers.1.self_attn", "forward hook")],
)  # fmt: skip
def test_a_changed_map_is_called_and_learns_as_in_one_pass(path, change):
    core = core_of(mem_len=18, segment_len=18)
    x = torch.randn(18, 2, 5)
    plain, _ = read(core, x)
    changed = change_module(core, path, CHANGES[change])
    output, _ = read(core, x)
    wanted = core(x).output
    loss = output.sin().sum()
    same([output, *gradients(core, loss)], [wanted, *gradients(core, wanted.sin().sum())])
    assert torch.allclose(output, plain) == (change in ("old weight norm", "weight norm"))
    assert all(grad.any() for grad in gradients(list(changed.parameters()), loss))
    if change == "LoRA":
        assert changed.n_calls == 3 + 1  # three segments, and one pass

    stepper = Stepper(core.eval(), 2)
    same([torch.cat([stepper.read(part) for part in x.split(5)])], [wanted])
    memory = None
    # A training without gradient through memory uses no graph twice.
    for part in x.split(6):
        output, memory, _ = core(part, memory)
        output.sin().sum().backward()


@pytest.mark.parametrize("path", [*MAPS, F_C])
def test_hooks_of_both_passes_are_called_once_a_segment(path):
    core = core_of("compressive" if path == F_C else "transformer-xl")
    calls = []
    core.get_submodule(path).register_forward_hook(lambda *_: calls.append("forward"))
    core.get_submodule(path).register_full_backward_hook(lambda *_: calls.append("backward"))
    memory = None
    for part in torch.randn(24, 2, 5).split(6):
        output, memory, loss = core(part, memory)
        (output.square().sum() + loss).backward()
    n_segments = 3 if path == F_C else 4  # the first segment compresses nothing
    assert calls == ["forward", "backward"] * n_segments


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("compression", ["conv", "dilated"])
@pytest.mark.parametrize("change", [name for name in CHANGES if name != "LoRA"])
def test_a_changed_convolution_is_called_and_learns(compression, change):
    core = core_of("compressive", compression=compression)
    x = torch.randn(24, 2, 5)
    plain, _ = read(core, x)
    path = F_C if compression == "conv" else "transformer.rules.0.f_c.dilated.1"
    changed = change_module(core, path, CHANGES[change])
    output, loss = read(core, x)
    assert torch.allclose(output, plain) == (change in ("old weight norm", "weight norm"))
    assert all(grad.any() for grad in gradients(list(changed.parameters()), loss))


@torch.no_grad()
def test_a_quantized_model_reads_segments_and_steps():
    core = core_of("compressive").eval()
    x = torch.randn(24, 2, 5)
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(core), {nn.Linear})
    change_module(quantized, F_C, lambda conv: nn.Sequential(conv))
    output, loss = read(quantized, x)
    plain, plain_loss = read(core, x)
    torch.testing.assert_close([output, loss], [plain, plain_loss], rtol=0, atol=0.5)
    assert not torch.equal(output, plain)
    stepper = Stepper(quantized, 2)
    steps = torch.stack([stepper.step(features) for features in x])
    torch.testing.assert_close(steps, plain, rtol=0, atol=0.5)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("S", "M"), [(3, 4), (1, 1), (2, 9)])
def test_maps_folded_into_a_norm_give_what_the_modules_give(norm, positions, bias, S, M):
    """The output and every gradient, with keys that some queries don't see."""
    attention = fill_zeros(RelativeMultiHeadAttention(3, 12, 0.0, positions=positions))
    attention.query = nn.Linear(12, 12, bias=bias)
    norm = fill_zeros(nn.LayerNorm(12)) if norm else None
    assert can_fold(attention, norm)
    x = torch.randn(S, 2, 12, requires_grad=True)
    past = torch.randn(M, 2, 12, requires_grad=True)
    key_start = torch.randint(0, M + 1, (2, S))
    context = torch.cat((past, x))
    if norm:
        context = norm(context)
    plain = attention(query=context[M:], key=context, value=context, key_start=key_start)
    folded = attend_with_memory(attention, norm, x, x, past, key_start)
    learning = [x, past, *attention.parameters(), *(norm.parameters() if norm else ())]
    weight = torch.randn_like(plain)
    wanted = gradients(learning, (plain * weight).sum())
    same([folded, *gradients(learning, (folded * weight).sum())], [plain, *wanted])


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_layers_that_are_computed_again_keep_less(model):
    core = core_of(model, dropout=0.5).train()
    x = torch.randn(18, 2, 5)

    def compute(recompute):
        """The numbers that are kept for the backward pass, the output and the gradients."""
        core.transformer.activation_checkpointing = recompute
        torch.manual_seed(3)
        kept, output = kept_by(lambda: read(core, x)[0])
        return sum(map(torch.numel, kept)), [output, *gradients(core, output.square().sum())]

    n_plain, plain = compute(recompute=False)
    n_recomputed, recomputed = compute(recompute=True)
    assert n_recomputed < n_plain / 2
    torch.testing.assert_close(recomputed, plain)


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_layers_that_are_computed_again_get_tensors_by_position(model, monkeypatch):
    """Tensors by name have no gradient."""
    named = []
    checkpoint = stack_module.checkpoint

    def watch(*arguments, **options):
        named.extend(options.values())
        return checkpoint(*arguments, **options)

    monkeypatch.setattr(stack_module, "checkpoint", watch)
    core = core_of(model).train()
    core.transformer.activation_checkpointing = True
    read(core, torch.randn(18, 2, 5))
    assert named
    assert not any(isinstance(value, torch.Tensor) for value in named)
