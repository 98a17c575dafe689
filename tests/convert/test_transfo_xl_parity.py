"""The original Transformer-XL's weights in our model, against the original written from its equations, in
double precision.

The weights depend on the vocabulary (three forms of clusters, the width of vectors, ties) and on three more
settings. All 12 vocabularies are compared, each with one choice of these three; and one with distances that
are clamped and cut.
"""

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from memformers import from_transfo_xl, load_weights
from memformers.convert.transfo_xl import OURS_ALONE
from tests.convert.transfo_xl_reference import Reference
from tests.texts import same

BOTH = (False, True)
CLUSTERS = (((), 1), ((3, 7), 1), ((3, 7), 2))
"""Cutoffs and div_val."""
MODELS = [
    (*CLUSTERS[a], (12, 8)[c], d, bool(a & 1) ^ c, c ^ d, bool(a & 1) ^ d, {})
    for a, c, d in itertools.product(range(3), BOTH, BOTH)
]
MODELS += [
    (*CLUSTERS[2], 12, True, False, True, a ^ b ^ c,
     {"clamp_len": (4, 100)[a], "same_length": b, "mem_len": (8, 3)[c]})
    for a, b, c in itertools.product(BOTH, repeat=3)
]  # fmt: skip


def made(**changes):
    """A model with clusters of rare words whose vectors are narrower, and its state dict."""
    reference = Reference(**{"cutoffs": (3, 7), "div_val": 2} | changes)
    return reference, reference.named(reference.weights())


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("cutoffs", "div_val", "d_embed", "tied", "untie_r", "original", "pre_lnorm", "lengths"), MODELS
)
def test_outputs_memories_and_gradients_agree_over_four_segments(
    cutoffs, div_val, d_embed, tied, untie_r, original, pre_lnorm, lengths
):
    reference = Reference(cutoffs, div_val, d_embed, tied, untie_r, original, pre_lnorm=pre_lnorm, **lengths)
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
        same([logits, *(layer.mem for layer in memory.layers)], [wanted, *mems])
        their_loss = their_loss - wanted.gather(-1, targets[..., None]).mean()
        our_loss = our_loss + F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    same([our_loss], [their_loss])
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
        same([grad], [wanted[name]])
        assert grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("div_val", "dropped"),
    [(2, r"crit\.(out_layers\.\d\.weight|out_projs\.[12])"), (1, r"crit\.out_projs\.[12]"), (1, "nothing")],
)
@pytest.mark.parametrize(("suffix", "original"), [("bin", True), ("safetensors", False)])
def test_tied_weights_may_be_stored_once_or_twice(div_val, dropped, suffix, original, tmp_path):
    reference = Reference((3, 7), div_val, 8, tied=True, original=original)
    weights = {name: t.detach() for name, t in reference.weights().items()}
    kept = {name: t.clone() for name, t in reference.named(weights).items() if not re.search(dropped, name)}
    path = tmp_path / f"model.{suffix}"
    save_file(kept, path) if suffix == "safetensors" else torch.save(kept, path)
    model = from_transfo_xl(load_weights(path), reference.config)
    assert model.config.adaptive.tie_weights
    assert model.config.adaptive.tie_projections
    tokens = torch.randint(0, reference.V, (5, 2))
    torch.testing.assert_close(model(tokens).logits, reference.forward(weights, tokens, [])[0])


def test_what_the_weights_do_not_show_is_the_configs_or_our_default():
    reference, state = made()
    config = from_transfo_xl(state, reference.config).config
    assert (config.mem_len, config.segment_len) == (8, 5)
    config = from_transfo_xl(state, {"pre_lnorm": False}).config
    assert (config.mem_len, config.segment_len, config.adaptive.cutoffs) == (64, 64, (3, 7))
    assert from_transfo_xl(state, {"pre_lnorm": True}).config.norm == "pre-without-final"
    assert from_transfo_xl(made(original=False)[1]).config.norm == "post"


@pytest.mark.parametrize(
    ("change", "message"),
    [({"layers.1.dec_attn.o_net.weight": None}, r"layers\.1\.dec_attn\.o_net\.weight \[12, 12\], got none"),
     ({"layers.0.dec_attn.q_net.weight": torch.ones(2)}, r"dec_attn\.q_net\.weight none, got \[2\]"),
     ({"word_emb.emb_layers.0.weight": torch.ones(3)}, r"matrices word_emb\.emb_layers\.0\.weight"),
     ({"word_emb.emb_layers.1.weight": torch.ones(4, 5)}, r"emb_layers\.1\.weight \[4, 6\], got \[4, 5\]"),
     ({"r_w_bias": None}, r"matrices layers\.0\.dec_attn\.r_w_bias"),
     ({"r_w_bias": torch.ones(2, 4)}, r"dec_attn\.r_w_bias \[2, 6\], got \[2, 4\]"),
     ({"crit.out_layers.1.bias": torch.ones(4, dtype=torch.int8)}, r"out_layers\.1\.bias .*int8"),
     ({"crit.cluster_bias": torch.ones(1)}, r"cluster_bias \[2\], got \[1\]")],
)  # fmt: skip
def test_weights_that_do_not_fit_are_named(change, message):
    changed = {name: t for name, t in (made()[1] | change).items() if t is not None}
    with pytest.raises(ValueError, match=message) as error:
        from_transfo_xl(changed, {"pre_lnorm": False})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [({"cutoffs": None}, "cutoffs=None"), ({"cutoffs": [3, 30]}, r"cutoffs=\(3, 30\)"),
     ({"cutoffs": 3}, "cutoffs=3"), ({"cutoffs": [3]}, r"2 clusters .* cutoffs=\[3\]"),
     ({"attn_type": 2}, "attn_type=0, .* attn_type=2"), ({"mem_len": "long"}, "mem_len='long'"),
     ({"mem_len": -1}, "mem_len=-1"), ({"clamp_len": "far"}, "clamp_len='far'"),
     ({"pre_lnorm": None}, "pre_lnorm=None"), ({"pre_lnorm": "no"}, "pre_lnorm='no'")],
)  # fmt: skip
def test_a_config_that_can_not_be_used_is_an_error(config, message):
    """None stands for a setting that is left out."""
    config = {"pre_lnorm": False, "cutoffs": [3, 7]} | config
    with pytest.raises(ValueError, match=message):
        from_transfo_xl(made(div_val=1)[1], {name: v for name, v in config.items() if v is not None})


def test_a_state_dict_of_another_model_is_an_error():
    with pytest.raises(ValueError, match=r"Transformer-XL, .* weight, bias"):
        from_transfo_xl(torch.nn.Linear(2, 2).state_dict())
