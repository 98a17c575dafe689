"""Weights and modules that change between two steps, and inference mode: each step gives what the model's
forward pass gives for the running segment, with what the model consists of in that moment."""

from itertools import cycle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from memformers import CoreConfig, FeedForward, MemoryCore, Stepper, TrainConfig, generate
from memformers.evaluation.conformance import SMALL as SMALL_SETTINGS
from memformers.models.language_model import LMOutput
from memformers.training.config import OptimConfig
from memformers.training.optimizers import build_optimizers
from tests.builders import MODELS, SMALL, fill_zeros, small_lm
from tests.texts import EXACT, documents, read, same, tokens

WITH_MEMORY = [model for model in MODELS if model != "transformer"]
S = SMALL.segment_len


@pytest.fixture(autouse=True)
def _double_precision(float64):
    yield
    nn.modules.module._global_forward_hooks.clear()


@torch.no_grad()
def check_steps(lm, stepper, text, n_read, doc_starts=None):
    """Let ``stepper``, which has read the first ``n_read`` tokens, read the others one by one, and compare
    with ``lm``, which reads the segment so far anew for each of them."""
    if doc_starts is None:
        doc_starts = documents(*text.shape)
    begin = n_read // S * S
    memory = stepper.memory()
    for end in range(n_read + 1, len(text) + 1):
        has_starts = doc_starts.any()
        wanted = lm(text[begin:end], memory, None, doc_starts[begin:end] if has_starts else None)
        logits = stepper.step(text[end - 1], doc_starts[end - 1] if has_starts else None)
        torch.testing.assert_close(logits, wanted.logits[-1], **EXACT)
        if end - begin == S:
            begin = end
            memory = wanted.memory


def stepper_after(lm, text, n_read, doc_starts=None):
    """A stepper that has read the first ``n_read`` tokens."""
    stepper = Stepper(lm, 2)
    stepper.read(text[:n_read], None if doc_starts is None else doc_starts[:n_read])
    return stepper


def train_a_step(lm, build_optimizer):
    lm.train()
    lm(tokens(S), None, tokens(S)).scores.loss.backward()
    for optimizer in build_optimizer():
        optimizer.step()
    lm.zero_grad()
    lm.eval()


def optimizer(kind, **settings):
    return lambda lm: train_a_step(lm, lambda: [kind(lm.parameters(), lr=0.1, **settings)])


def our_adamw(lm):
    config = TrainConfig(model=lm.config, optim=OptimConfig(optimizer="adamw", learning_rate=0.1))
    train_a_step(lm, lambda: build_optimizers(lm, config))


def only_biases(lm):
    biases = [p for name, p in lm.transformer.named_parameters() if name.endswith("bias")]
    train_a_step(lm, lambda: [torch.optim.SGD(biases, lr=1, fused=True)])


def in_place_of_data(lm):
    for p in lm.parameters():
        p.data.add_(torch.randn_like(p) / 10)


def other_data(lm):
    for p in lm.parameters():
        p.data = p.data + torch.randn_like(p) / 10


def average(lm):
    for p in lm.parameters():
        p.data.lerp_(torch.randn_like(p), 0.1)


def average_of_all(lm):
    with torch.no_grad():
        torch._foreach_lerp_(list(lm.parameters()), [torch.randn_like(p) for p in lm.parameters()], 0.1)


def one_head_without_keys(lm):
    lm.transformer.layers[1].self_attn.key.weight.data[:4] = 0


def one_number(lm):
    with torch.no_grad():
        lm.transformer.layers[0].self_attn.value.weight[3, 5] = 7


def loaded(lm, assign=False):
    state = small_lm(lm.config.model, token_shift=True).state_dict()
    lm.load_state_dict({name: x.clone() for name, x in state.items()}, assign=assign)


def other_map(lm):
    lm.transformer.layers[0].self_attn.key = nn.Linear(12, 12, bias=False)


def other_network(lm):
    lm.transformer.layers[1].feed_forward = FeedForward(12, 5, 0.0).eval()


def other_embedding(lm):
    lm.embed = nn.Embedding(11, 12)


def other_transformer(lm):
    lm.transformer = small_lm(lm.config.model, token_shift=True).transformer.eval()


def hooked_map(lm):
    lm.transformer.layers[0].self_attn.key.register_forward_hook(lambda *call: 5 * call[-1])


def hooked_layer(lm):
    lm.transformer.layers[0].register_forward_hook(lambda *call: 2 * call[-1])


def hooked_model(lm):
    lm.register_forward_hook(lambda *call: LMOutput(2 * call[-1].logits, *call[-1][1:]))


def hook_of_all_modules(lm):
    norm = lm.transformer.layers[0].norm_ff
    nn.modules.module.register_module_forward_hook(lambda m, _, y: 3 * y if m is norm else None)


def hook_that_shifts_positions(lm):
    """What is right for one position alone would be wrong for a segment."""
    lm.transformer.layers[0].self_attn.value.register_forward_hook(lambda *call: call[-1].cumsum(0))


def replaced_forward(lm):
    network = lm.transformer.layers[1].feed_forward
    forward = network.forward
    network.forward = lambda x: 2 * forward(x)


def replaced_method(lm):
    layer = lm.transformer.layers[1]
    joined = layer.joined
    layer.joined = lambda *inputs: 2 * joined(*inputs)


def pruned(lm):
    prune.l1_unstructured(lm.transformer.layers[0].self_attn.key, "weight", 0.5)


class Tripled(nn.Module):
    def forward(self, weight):
        return 3 * weight


def parametrized(lm):
    parametrize.register_parametrization(lm.transformer.layers[0].self_attn.key, "weight", Tripled())


def weight_normed(lm):
    network = lm.transformer.layers[0].feed_forward
    parametrizations.weight_norm(network.layer1).parametrizations.weight.original0.data.mul_(2)


class Adapted(nn.Module):
    """A linear map with an adapter beside it, whose strength is a plain attribute."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.settings = {"strength": 1.0}
        self.down = nn.Linear(12, 2, bias=False)
        self.up = nn.Linear(2, 12, bias=False)

    def forward(self, x):
        return self.inner(x) + self.settings["strength"] * self.up(self.down(x))


def adapted(lm):
    attention = lm.transformer.layers[0].self_attn
    attention.value = Adapted(attention.value).eval()


def other_epsilon(lm):
    lm.transformer.layers[0].norm_self_attn.eps = 0.5


CHANGES = {
    "fused AdamW": optimizer(torch.optim.AdamW, fused=True),
    "fused Adam": optimizer(torch.optim.Adam, fused=True),
    "fused SGD": optimizer(torch.optim.SGD, fused=True),
    "fused Adagrad": optimizer(torch.optim.Adagrad, fused=True),
    "foreach AdamW": optimizer(torch.optim.AdamW, foreach=True),
    "optimizer=adamw": our_adamw,
    "assigned state": lambda lm: loaded(lm, assign=True),
}
for function in (
    only_biases, in_place_of_data, other_data, average, average_of_all, one_head_without_keys,
    one_number, loaded, other_map, other_network, other_embedding, other_transformer, hooked_map,
    hooked_layer, hooked_model, hook_of_all_modules, hook_that_shifts_positions, replaced_forward,
    replaced_method, pruned, parametrized, weight_normed, adapted, other_epsilon,
):  # fmt: skip
    CHANGES[function.__name__] = function


# Slots need memory too, so the Compressive Transformer has every change; the others have one of each kind.
OF_EACH_KIND = (
    "fused AdamW",
    "other_data",
    "loaded",
    "other_map",
    "hooked_layer",
    "replaced_method",
    "parametrized",
)


@pytest.mark.parametrize(
    ("model", "change"),
    [*(("compressive", change) for change in CHANGES),
     *((model, change) for model in ("transformer-xl", "selective") for change in OF_EACH_KIND)],
)  # fmt: skip
def test_a_step_computes_with_the_model_of_that_moment(model, change):
    lm = small_lm(model, token_shift=True).eval()
    text = tokens(3 * S + 4)
    stepper = stepper_after(lm, text, 2 * S + 3)
    unchanged = lm(text[2 * S :], stepper.memory()).logits
    CHANGES[change](lm)
    assert not torch.allclose(lm(text[2 * S :], stepper.memory()).logits, unchanged)
    check_steps(lm, stepper, text, 2 * S + 3)


@pytest.mark.parametrize("n_read", [2 * S, 2 * S + 1, 3 * S - 1])
@pytest.mark.parametrize("change", ["fused AdamW", "in_place_of_data", "hooked_layer"])
def test_a_change_takes_effect_anywhere_in_a_segment(n_read, change):
    """Where documents begin, too."""
    lm = small_lm("compressive", token_shift=True).eval()
    text = tokens(4 * S)
    doc_starts = documents(4 * S, 2, (S - 2, 0), (2 * S, 1), (2 * S + 4, 0), (3 * S, 0))
    stepper = stepper_after(lm, text, n_read, doc_starts)
    CHANGES[change](lm)
    check_steps(lm, stepper, text, n_read, doc_starts)


@pytest.mark.parametrize("change", ["fused AdamW", "other_map", "hooked_model"])
def test_a_model_without_memory_changes_too(change):
    lm = small_lm("transformer").eval()
    text = tokens(3 * S)
    stepper = stepper_after(lm, text, 2 * S)
    CHANGES[change](lm)
    for end in range(2 * S + 1, 3 * S):
        wanted = lm(text[end - S : end]).logits[-1]
        torch.testing.assert_close(stepper.step(text[end - 1]), wanted, **EXACT)


def test_a_core_in_training_mode_changes_too():
    settings = {name: value for name, value in SMALL_SETTINGS.items() if name != "vocab_size"}
    core = fill_zeros(MemoryCore(CoreConfig(**settings, dropout=0.5, d_input=3))).train()
    x = torch.randn(9, 2, 3)
    stepper = stepper_after(core, x, 8)
    core.encode.weight.data.mul_(2)
    same([stepper.step(x[8])], core.eval()(x[6:], stepper.memory()).output[-1:])


def test_a_hook_takes_effect_until_it_is_removed():
    lm = small_lm("compressive", token_shift=True).eval()
    text = tokens(4 * S)
    stepper = stepper_after(lm, text, 2 * S + 1)
    hook = lm.transformer.layers[0].register_forward_hook(lambda *call: 2 * call[-1])
    check_steps(lm, stepper, text[: 2 * S + 3], 2 * S + 1)
    hook.remove()
    check_steps(lm, stepper, text[: 2 * S + 5], 2 * S + 3)
    hooked_map(lm)
    check_steps(lm, stepper, text, 2 * S + 5)


def test_a_setting_that_an_adapter_changes_in_place_takes_effect():
    lm = small_lm("transformer-xl").eval()
    text = tokens(4 * S)
    adapted(lm)
    stepper = stepper_after(lm, text, 2 * S + 2)
    lm.transformer.layers[0].self_attn.value.settings["strength"] = 0.0
    check_steps(lm, stepper, text, 2 * S + 2)


class Counting(nn.Module):
    """Computes more with each call, whose number it keeps as an attribute and the input as another."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.n_calls = 0
        self.last_input = None

    def forward(self, x):
        self.n_calls += 1
        self.last_input = x
        return self.inner(x)


def test_a_module_that_changes_itself_is_read_as_in_a_forward_pass():
    lm = small_lm("selective").eval()
    text = tokens(3 * S)
    lm.transformer.layers[0].feed_forward = Counting(lm.transformer.layers[0].feed_forward).eval()
    check_steps(lm, Stepper(lm, 2), text, 0)


class Interruptible(nn.Module):
    """Ctrl-C within its next call, if there is an element in ``pending``."""

    def __init__(self, inner, pending):
        super().__init__()
        self.inner = inner
        self.next_interrupt = lambda: pending and pending.pop()  # no attribute that changes

    def forward(self, x):
        if self.next_interrupt():
            raise KeyboardInterrupt
        return self.inner(x)


@pytest.mark.parametrize("change", ["in_place_of_data", "hooked_map"])
def test_ctrl_c_while_a_segment_is_read_again_loses_nothing(change):
    lm = small_lm("compressive", token_shift=True).eval()
    text = tokens(3 * S)
    layer = lm.transformer.layers[1]
    pending = []
    layer.feed_forward = Interruptible(layer.feed_forward, pending).eval()
    doc_starts = documents(3 * S, 2, (S, 0))
    stepper = stepper_after(lm, text, S + 4, doc_starts)
    CHANGES[change](lm)
    for _ in range(2):
        pending.append(True)
        with pytest.raises(KeyboardInterrupt):
            stepper.step(text[S + 4])
    check_steps(lm, stepper, text, S + 4, doc_starts)


@pytest.mark.parametrize("model", WITH_MEMORY)
@pytest.mark.parametrize("first_mode", [True, False])
def test_a_stepper_is_read_in_and_out_of_inference_mode(model, first_mode):
    """It is made in one mode, and read in both in turns."""
    lm = small_lm(model, token_shift=True).eval()
    text = tokens(4 * S)
    doc_starts = documents(4 * S, 2, (0, 1), (S + 3, 0), (2 * S, 0))
    wanted, *_ = read(lm, text, doc_starts)
    with torch.inference_mode(first_mode):
        stepper = Stepper(lm, 2)
    modes = cycle([first_mode, not first_mode, first_mode])
    for begin, mode in zip(range(0, 4 * S, 3), modes, strict=False):
        with torch.inference_mode(mode):
            end = min(begin + 3, 4 * S)
            logits = stepper.read(text[begin:end].clone(), doc_starts[begin:end].clone())
            same(logits[-1:], wanted[end - 1 : end])


@pytest.mark.parametrize("model", MODELS)
def test_a_model_built_in_inference_mode_generates_outside_of_it(model):
    with torch.inference_mode():
        lm = small_lm(model).eval()
        inside = list(generate(lm, tokens(3 * S), 9, seed=0))
    torch.manual_seed(0)
    ordinary = small_lm(model).eval()
    prompt = tokens(3 * S)
    wanted = list(generate(ordinary, prompt, 9, seed=0))
    same(inside, wanted)
    same(generate(lm, prompt, 9, seed=0), wanted)


def test_weights_of_inference_mode_that_change_are_noticed():
    with torch.inference_mode():
        lm = small_lm("transformer-xl").eval()
        text = tokens(3 * S)
        stepper = stepper_after(lm, text, S + 2)
        lm.transformer.layers[0].self_attn.key.weight.mul_(3)
        check_steps(lm, stepper, text, S + 2)


def test_a_hook_of_the_model_itself_is_called_once_for_each_token():
    lm = small_lm("compressive").eval()
    calls = []
    lm.register_forward_hook(lambda *call: calls.append(1))
    list(generate(lm, tokens(1), 2 * S, seed=0))
    assert len(calls) == 1 + 2 * S
