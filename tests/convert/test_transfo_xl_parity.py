"""The original Transformer-XL's weights in our model, against the original written from its equations, in
double precision.

Seven settings of two values each decide what the weights are. Of the 128 models, 16 are compared: each of the
16 vocabularies (the first four settings) with one layout of the other three, each of which is the parity of
three of those four. So every combination of values of any three settings occurs (a design of resolution IV),
and each pair of values four times. The cuts of distances are chosen in the same way, 8 of 16.
"""

import itertools
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from memformers import from_transfo_xl, load_weights
from memformers.convert.transfo_xl import OURS_ALONE
from memformers.generation.incremental import Stepper
from tests.convert.transfo_xl_reference import Reference

BOTH = (False, True)
MODELS = [
    (((), (3, 7))[a], (1, 2)[b], (12, 8)[c], d, a ^ b ^ c, b ^ c ^ d, a ^ c ^ d)
    for a, b, c, d in itertools.product(BOTH, repeat=4)
]
CUTS = [((4, 100)[a], b, (8, 3)[c], a ^ b ^ c) for a, b, c in itertools.product(BOTH, repeat=3)]


def made(**changes):
    """A model with clusters of rare words whose vectors are narrower, and its state dict."""
    reference = Reference(**{"cutoffs": (3, 7), "div_val": 2} | changes)
    return reference, reference.named(reference.weights())


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("cutoffs", "div_val", "d_embed", "tied", "untie_r", "original", "pre_lnorm"), MODELS
)
def test_outputs_memories_and_gradients_agree_over_four_segments(
    cutoffs, div_val, d_embed, tied, untie_r, original, pre_lnorm
):
    reference = Reference(cutoffs, div_val, d_embed, tied, untie_r, original, pre_lnorm=pre_lnorm)
    weights = reference.weights()
    model = from_transfo_xl(reference.named(weights), reference.config)
    shared, maps = model.config.adaptive, div_val > 1 or d_embed != 12
    assert shared.tie_weights == tied
    assert shared.tie_projections == (tied and bool(cutoffs) and maps)
    mems, memory, their_loss, our_loss = [], None, 0.0, 0.0
    for S in (5, 5, 2, 7):
        tokens, targets = torch.randint(0, reference.V, (2, S, 3))
        wanted, mems = reference.forward(weights, tokens, mems)
        logits, memory, _ = model(tokens, memory)
        close(logits, wanted)
        close(list(memory.mem), mems)
        their_loss = their_loss - wanted.gather(-1, targets[..., None]).mean()
        our_loss = our_loss + F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    close(our_loss, their_loss)
    our_loss.backward()
    their_loss.backward()
    # Their gradients go through the same map as their weights.
    grads = {name: t.grad for name, t in weights.items()}
    wanted = dict(from_transfo_xl(reference.named(grads), reference.config).named_parameters())
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert set(ours) == set(wanted)
    for name, grad in ours.items():
        if name.endswith(OURS_ALONE):
            continue
        if name.endswith((".u", ".v")) and not untie_r:
            grad = sum(g for other, g in ours.items() if other.endswith(name[-len(".u") :]))
        close(grad, wanted[name])
        assert grad.abs().sum() > 0


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("clamp_len", "same_length", "mem_len", "pre_lnorm"), CUTS)
def test_distances_are_clamped_and_cut_as_the_config_says_by_segment_and_by_token(
    clamp_len, same_length, mem_len, pre_lnorm
):
    lengths = {"clamp_len": clamp_len, "same_length": same_length, "mem_len": mem_len}
    reference = Reference((3, 7), 2, tied=True, pre_lnorm=pre_lnorm, **lengths)
    weights = reference.weights()
    model = from_transfo_xl(reference.named(weights), reference.config)
    one_by_one, in_portions, mems, memory = Stepper(model, 2), Stepper(model, 2), [], None
    for _ in range(4):
        tokens = torch.randint(0, reference.V, (5, 2))
        wanted, mems = reference.forward(weights, tokens, mems)
        logits, memory, _ = model(tokens, memory)
        close(logits, wanted)
        close(list(memory.mem), mems)
        close(torch.stack([one_by_one.step(token) for token in tokens]), wanted.detach())
        close(in_portions.read(tokens[:2])[-1], wanted[1].detach())
        close(in_portions.read(tokens[2:])[-1], wanted[4].detach())


@pytest.mark.parametrize(
    ("div_val", "dropped"),
    [(2, r"crit\.(out_layers\.\d\.weight|out_projs\.[12])"), (1, r"crit\.out_projs\.[12]"), (1, "nothing")],
)
@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
@pytest.mark.parametrize("original", BOTH)
def test_files_in_single_precision_give_the_same_model_with_and_without_copies_of_what_is_tied(
    div_val, dropped, suffix, original, tmp_path
):
    reference = Reference((3, 7), div_val, 8, tied=True, original=original)
    weights = {name: t.detach() for name, t in reference.weights().items()}
    kept = {name: t.clone() for name, t in reference.named(weights).items() if not re.search(dropped, name)}
    path = tmp_path / f"model.{suffix}"
    save_file(kept, path) if suffix == "safetensors" else torch.save(kept, path)
    model = from_transfo_xl(load_weights(path), reference.config)
    assert model.config.adaptive.tie_weights
    assert model.config.adaptive.tie_projections
    tokens = torch.randint(0, reference.V, (5, 2))
    logits = model(tokens).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference.forward(weights, tokens, [])[0])


def test_what_the_weights_do_not_show_is_the_configs_or_our_default_and_where_they_normalize_must_be_said():
    reference, state = made()
    config = from_transfo_xl(state, reference.config).config
    assert (config.mem_len, config.segment_len) == (8, 5)
    config = from_transfo_xl(state, {"pre_lnorm": False}).config
    assert (config.mem_len, config.segment_len, config.adaptive.cutoffs) == (64, 64, (3, 7))
    assert from_transfo_xl(state, {"pre_lnorm": True}).config.norm == "pre-without-final"
    assert from_transfo_xl(made(original=False)[1]).config.norm == "post"
    with pytest.warns(UserWarning, match=r"dropatt=0\.0 is not used: .* dropout=0\.1 applies to attention"):
        from_transfo_xl(state, reference.config | {"dropout": 0.1, "dropatt": 0.0})
    with warnings.catch_warnings(action="error"):
        from_transfo_xl(state, reference.config | {"dropout": 0.1, "dropatt": 0.1})


@pytest.mark.parametrize(
    ("change", "message"),
    [({"layers.1.dec_attn.o_net.weight": None}, r"layers\.1\.dec_attn\.o_net\.weight \[12, 12\], got none"),
     ({"layers.0.dec_attn.q_net.weight": torch.ones(2)}, r"dec_attn\.q_net\.weight none, got \[2\]"),
     ({"layers.1.pos_ff.CoreNet.0.bias": torch.ones(9)}, r"layers\.1\..*bias \[16\], got \[9\]"),
     ({"word_emb.emb_layers.0.weight": torch.ones(3)}, r"emb_layers\.0\.weight .*2 .*\[3\]"),
     ({"word_emb.emb_layers.1.weight": torch.ones(4, 5)}, r"emb_layers\.1\.weight \[4, 6\], got \[4, 5\]"),
     ({"r_w_bias": None}, r"layers\.0\.dec_attn\.r_w_bias"),
     ({"r_w_bias": torch.ones(2, 4)}, r"n_head=2 .*d_head=4 .*d_model=12"),
     ({"crit.out_layers.1.bias": torch.ones(4, dtype=torch.int8)}, r"out_layers\.1\.bias .*int8"),
     ({"crit.cluster_bias": torch.ones(1)}, r"1 clusters .*cutoffs=\[3, 7\] make 2")],
)  # fmt: skip
def test_weights_that_do_not_fit_are_named(change, message):
    changed = {name: t for name, t in (made()[1] | change).items() if t is not None}
    with pytest.raises(ValueError, match=message) as error:
        from_transfo_xl(changed, {"pre_lnorm": False})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [({"cutoffs": None}, r"2 clusters .*cutoffs=\[\] make 0"), ({"cutoffs": [3, 30]}, r"cutoffs=\(3, 30\)"),
     ({"cutoffs": 3}, "cutoffs=3"), ({"n_head": 4}, r"n_head=3, .* n_head=4"),
     ({"attn_type": 2}, r"attn_type=0, .* attn_type=2"),
     ({"mem_len": "long"}, "mem_len='long'"), ({"mem_len": -1}, "mem_len=-1"),
     ({"dropout": "0.1"}, "dropout='0.1'"), ({"pre_lnorm": None}, "pre_lnorm=None"),
     ({"pre_lnorm": "no"}, "pre_lnorm='no'")],
)  # fmt: skip
def test_a_config_of_another_model_is_an_error(config, message):
    """None stands for a setting that is left out."""
    config = {"pre_lnorm": False, "cutoffs": [3, 7]} | config
    with pytest.raises(ValueError, match=message):
        from_transfo_xl(made(div_val=1)[1], {name: v for name, v in config.items() if v is not None})


def test_a_state_dict_of_another_model_is_an_error():
    with pytest.raises(ValueError, match=r"Transformer-XL, .* weight, bias"):
        from_transfo_xl(torch.nn.Linear(2, 2).state_dict())
