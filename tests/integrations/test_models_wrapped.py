"""Models whose weights or modules another library replaced: they read several segments, step and generate as
a plain model with the weights that the library means, to the precision of its numbers."""

import copy
import warnings
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from memformers import AdaptiveConfig, AttentionReconstructionLoss, Stepper, generate
from tests.builders import small_lm
from tests.texts import read, tokens

MODELS = ("transformer-xl", "compressive", "selective")
EXACT = 1e-5
# The largest difference as a part of the largest logit: for the same weights in float32, and for activations
# that are rounded to 8 bits, whose steps are up to 1/127 of the largest number in each product.
ROUNDED = 0.05


@pytest.fixture(autouse=True)
def _without_warnings():
    """The libraries warn of changes, each other's and theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def package(name):
    """A module of a package that isn't always installed."""
    return pytest.importorskip(name, reason=f"{name} is missing; make test-integrations installs it")


def plain_lm(model, **changes):
    """A model that doesn't always predict the same, of widths that all libraries take."""
    settings = {"d_model": 32, "n_heads": 4, "d_ff": 64, "token_shift": model == "compressive"} | changes
    lm = small_lm(model, **settings)
    with torch.no_grad():
        for name, factor in (("embed", 5), ("head", 20)):
            for parameter in lm.get_submodule(name).parameters():
                parameter.mul_(factor)
    return lm.eval()


def with_plain_weights(lm, plain, weight_of):
    """A copy of ``plain`` in which each linear map has the weight that ``weight_of`` gives for the module of
    ``lm`` in its place."""
    plain = copy.deepcopy(plain)
    with torch.no_grad():
        for name, module in plain.named_modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(weight_of(lm.get_submodule(name)))
    return plain


def check(lm, plain, precision):
    """Compare ``lm`` with a ``plain`` model: five segments and more, stepping, and generation."""
    text = tokens(40)
    with torch.no_grad():
        wanted, *_ = read(plain, text)  # [40, 2, 11]
        tolerance = precision * wanted.abs().max().item()
        torch.testing.assert_close(read(lm, text)[0], wanted, rtol=0, atol=tolerance)
    # This pass is with gradient.
    torch.testing.assert_close(read(lm, text)[0].detach(), wanted, rtol=0, atol=tolerance)

    stepper = Stepper(lm, 2)
    got = [stepper.read(text[:10])[-1], *(stepper.step(x) for x in text[10:30]), stepper.read(text[30:])[-1]]
    torch.testing.assert_close(torch.stack(got), wanted[[*range(9, 30), 39]], rtol=0, atol=tolerance)

    # Where two tokens are nearly as likely, either may be the one that seems likeliest.
    written = torch.stack(list(generate(lm, text[:10, :1], 20, temperature=0)))[:, 0]
    logits = read(plain, torch.cat((text[:10, 0], written))[:, None])[0][9:-1, 0]  # [20, 11]
    chosen = logits.gather(1, written[:, None])[:, 0]
    assert (logits.amax(1) - chosen).max() <= 2 * tolerance


def dequantized(module):
    return module.weight.dequantize()


WEIGHT_ONLY = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", [*WEIGHT_ONLY, "Int8DynamicActivationInt8WeightConfig"])
def test_a_model_quantized_by_torchao(model, kind):
    torchao = package("torchao.quantization")
    plain = plain_lm(model)
    lm = copy.deepcopy(plain)
    torchao.quantize_(lm, getattr(torchao, kind)())
    assert type(lm.head.weight) is not nn.Parameter
    check(lm, with_plain_weights(lm, plain, dequantized), EXACT if kind in WEIGHT_ONLY else ROUNDED)


@pytest.mark.parametrize(
    "adaptive",
    [
        AdaptiveConfig(cutoffs=(3, 7), div_val=2),
        AdaptiveConfig(cutoffs=(3, 7), tie_weights=True),
        AdaptiveConfig(cutoffs=(3, 7), d_embed=16, tie_projections=True),
    ],
)
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_an_adaptive_vocabulary_quantized_by_torchao(adaptive, kind):
    torchao = package("torchao.quantization")
    plain = plain_lm("transformer-xl", embedding="adaptive", adaptive=adaptive)
    lm = copy.deepcopy(plain)
    torchao.quantize_(lm, getattr(torchao, kind)())
    plain = with_plain_weights(lm, plain, dequantized)
    check(lm, plain, EXACT)
    text = tokens(9)
    losses = [x(text[:-1], None, text[1:]).scores.loss.item() for x in (lm, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=EXACT)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("weights", ["qint8", "qint4", "qfloat8"])
def test_a_model_quantized_by_quanto(model, weights):
    quanto = package("optimum.quanto")
    plain = plain_lm(model)
    lm = copy.deepcopy(plain)
    quanto.quantize(lm, weights=getattr(quanto, weights))
    quanto.freeze(lm)
    check(lm, with_plain_weights(lm, plain, dequantized), EXACT)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_whose_activations_quanto_quantizes_in_hooks(model):
    quanto = package("optimum.quanto")
    plain = plain_lm(model)
    lm = copy.deepcopy(plain)
    quanto.quantize(lm, weights=quanto.qint8, activations=quanto.qint8)
    with quanto.Calibration(), torch.no_grad():
        read(lm, tokens(80))
    quanto.freeze(lm)
    check(lm, with_plain_weights(lm, plain, dequantized), ROUNDED)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_quantized_by_quantize_dynamic(model):
    plain = plain_lm(model)
    lm = torch.ao.quantization.quantize_dynamic(copy.deepcopy(plain), {nn.Linear})
    check(lm, with_plain_weights(lm, plain, lambda module: module.weight().dequantize()), ROUNDED)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("place", ["self_attn.query", "self_attn.key", "feed_forward.layer1"])
def test_a_pruned_model(model, place):
    plain = plain_lm(model)
    lm = copy.deepcopy(plain)
    for layer in lm.transformer.layers:
        prune.l1_unstructured(layer.get_submodule(place), "weight", 0.5)
    masked = copy.deepcopy(plain)
    with torch.no_grad():
        for layer in masked.transformer.layers:
            weight = layer.get_submodule(place).weight
            weight[weight.abs() <= weight.abs().flatten().kthvalue(weight.numel() // 2).values] = 0
    check(lm, masked, EXACT)


PLACES = ["query", "value", "position", "layer2"]


@pytest.mark.parametrize("model", MODELS)
def test_a_lora_adapter_is_disabled_and_merged_between_steps(model):
    peft = package("peft")
    plain = plain_lm(model)
    lm = copy.deepcopy(plain)
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=PLACES, init_lora_weights=False)
    peft.inject_adapter_in_model(config, lm).eval()
    merged = copy.deepcopy(plain)
    with torch.no_grad():
        for name, module in lm.named_modules():
            if isinstance(module, peft.tuners.lora.Linear):
                a = module.lora_A["default"].weight
                b = module.lora_B["default"].weight
                merged.get_submodule(name).weight.add_(b @ a, alpha=12 / 3)
    check(lm, merged, EXACT)

    text = tokens(13)
    stepper = Stepper(lm, 2)
    memory = read(merged, text[:7])[2]
    stepper.read(text[:10])
    adapters = [x for x in lm.modules() if isinstance(x, peft.tuners.lora.Linear)]
    for end, change, wanted in (
        (11, lambda x: x.enable_adapters(False), plain),
        (12, lambda x: x.enable_adapters(True), merged),
        (13, lambda x: x.merge(), merged),
    ):
        for adapter in adapters:
            change(adapter)
        with torch.no_grad():
            logits = wanted(text[7:end], memory).logits[-1]
        torch.testing.assert_close(stepper.step(text[end - 1]), logits, rtol=0, atol=EXACT * 20)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_with_ia3_of_peft(model):
    peft = package("peft")
    plain = plain_lm(model)
    lm = copy.deepcopy(plain)
    config = peft.IA3Config(
        target_modules=["key", "layer2"], feedforward_modules=["layer2"], init_ia3_weights=False
    )
    peft.inject_adapter_in_model(config, lm).eval()
    scaled = copy.deepcopy(plain)
    with torch.no_grad():
        for name, module in lm.named_modules():
            if isinstance(module, peft.tuners.ia3.Linear):
                # [out, 1], or [1, in] of a feed-forward module.
                scale = module.ia3_l["default"]
                scaled.get_submodule(name).weight.mul_(scale)
    check(lm, scaled, EXACT)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_a_model_that_transformers_loads_with_torchao(model, kind, tmp_path):
    torchao = package("torchao.quantization")
    transformers = package("transformers")
    from memformers.integrations.huggingface import MemformerConfig, MemformerForCausalLM

    plain = plain_lm(model)
    adapter = MemformerForCausalLM(MemformerConfig(**asdict(plain.config)))
    adapter.model.load_state_dict(plain.state_dict())
    adapter.save_pretrained(tmp_path)
    config = transformers.TorchAoConfig(getattr(torchao, kind)())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert type(loaded.model.transformer.layers[0].self_attn.key.weight) is not nn.Parameter
    weights = {name: x.dequantize() for name, x in loaded.model.state_dict().items() if hasattr(x, "qdata")}
    plain.load_state_dict(plain.state_dict() | weights)
    check(loaded.model, plain, EXACT if kind == WEIGHT_ONLY[0] else ROUNDED)
    prompt = tokens(10).T
    ours = torch.stack(list(generate(loaded.model, prompt.T, 20, temperature=0)), dim=1)
    assert torch.equal(loaded.generate(prompt, max_new_tokens=20, do_sample=False)[:, 10:], ours)


@pytest.fixture(scope="module")
def one_process():
    """A mesh of this process alone."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def sharded_by_layer(lm, mesh):
    from torch.distributed.fsdp import fully_shard

    lm = copy.deepcopy(lm)
    for layer in lm.transformer.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(lm, mesh=mesh)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("transformer-xl", {}),
        ("transformer-xl", {"token_shift": True, "gate": "gru"}),
        ("compressive", {"compression": "dilated"}),
        ("compressive", {"bptt": 1, "segment_len": 6}),
        ("selective", {"token_shift": True}),
    ],
)
def test_a_model_that_fsdp2_shards_layer_by_layer(model, changes, one_process):
    plain = plain_lm(model, **changes)
    lm = sharded_by_layer(plain, one_process)
    assert type(lm.transformer.layers[0].self_attn.query.weight).__name__ == "DTensor"
    check(lm, plain, EXACT)


@pytest.mark.parametrize("model", MODELS)
def test_fsdp2_gives_every_gradient_of_a_training_step(model, one_process):
    """Of the compressions too, which run between two calls of a layer."""
    plain = plain_lm(model)
    lm = sharded_by_layer(plain, one_process)
    text = tokens(36)
    for x in (plain.train(), lm.train()):
        memory = None
        for part, targets in zip(text[:-1].split(7), text[1:].split(7), strict=True):
            scores, memory, auxiliary = x(part, memory, targets)
            (scores.loss + auxiliary).backward()
    for (name, a), b in zip(plain.named_parameters(), lm.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(b.grad.full_tensor(), a.grad)


def test_the_reconstruction_loss_of_layers_that_fsdp2_shards(one_process):
    plain = plain_lm("compressive")
    layers = sharded_by_layer(plain, one_process).transformer.layers
    inputs, memories = (torch.randn(len(layers), n, 3, plain.config.d_model) for n in (5, 6))
    slots = [rule.f_c(mem) for rule, mem in zip(plain.transformer.rules, memories, strict=True)]
    losses = [
        AttentionReconstructionLoss(x)([*inputs], [*memories], slots)
        for x in (plain.transformer.layers, layers)
    ]
    torch.testing.assert_close(losses[1], losses[0])


@pytest.mark.parametrize("model", MODELS)
def test_a_model_whose_maps_are_parallel_tensors(model, one_process):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plain = plain_lm(model)
    lm = copy.deepcopy(plain)
    columns = ("self_attn.query", "self_attn.key", "self_attn.value", "feed_forward.layer1")
    plan = dict.fromkeys(columns, ColwiseParallel())
    plan |= dict.fromkeys(("self_attn.output", "feed_forward.layer2"), RowwiseParallel())
    for layer in lm.transformer.layers:
        parallelize_module(layer, one_process, plan)
    check(lm, plain, EXACT)
