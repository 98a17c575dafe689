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
# Cutoffs and div_val.
CLUSTERS = (((), 1), ((3, 7), 1), ((3, 7), 2))


def list_vocabularies():
    """All vocabularies, each with one choice of the other settings."""
    for number, (cutoffs, div_val) in enumerate(CLUSTERS):
        is_odd = number % 2 == 1
        for is_narrow, tied in itertools.product(BOTH, BOTH):
            yield Reference(
                cutoffs, div_val, d_embed=8 if is_narrow else 12, tied=tied, untie_r=is_odd ^ is_narrow,
                original=is_narrow ^ tied, pre_lnorm=is_odd ^ tied,
            )  # fmt: skip


def list_lengths():
    """Distances that are clamped and cut."""
    for is_far, same_length, is_short in itertools.product(BOTH, repeat=3):
        yield Reference(
            (3, 7), 2, tied=True, pre_lnorm=is_far ^ same_length ^ is_short,
            clamp_len=100 if is_far else 4, same_length=same_length, mem_len=3 if is_short else 8,
        )  # fmt: skip


def reference_and_state(**changes):
    """A model with clusters of rare words whose vectors are narrower, and its state dict."""
    reference = Reference(**{"cutoffs": (3, 7), "div_val": 2} | changes)
    return reference, reference.named(reference.weights())


def state_of(**changes):
    _, state = reference_and_state(**changes)
    return state


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("reference", [*list_vocabularies(), *list_lengths()], ids=str)
def test_outputs_memories_and_gradients_agree_over_four_segments(reference):
    weights = reference.weights()
    model = from_transfo_xl(reference.named(weights), reference.config)
    has_projections = reference.div_val > 1 or reference.d_embed != reference.D
    ties_projections = reference.tied and bool(reference.cutoffs) and has_projections
    assert model.config.adaptive.tie_weights == reference.tied
    assert model.config.adaptive.tie_projections == ties_projections

    mems = []
    memory = None
    their_loss = 0.0
    our_loss = 0.0
    for S in (5, 5, 2, 7):
        tokens, targets = torch.randint(0, reference.V, (2, S, 3))
        log_probabilities, mems = reference.forward(weights, tokens, mems)
        logits, memory, _ = model(tokens, memory)
        same([logits, *(layer.mem for layer in memory.layers)], [log_probabilities, *mems])
        their_loss = their_loss - log_probabilities.gather(-1, targets[..., None]).mean()
        our_loss = our_loss + F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    same([our_loss], [their_loss])
    our_loss.backward()
    their_loss.backward()
    check_gradients(model, reference, weights)


def check_gradients(model, reference, weights):
    """Their gradients go through the same map as their weights."""
    their_grads = {name: weight.grad for name, weight in weights.items()}
    mapped = from_transfo_xl(reference.named(their_grads), reference.config)
    wanted = dict(mapped.named_parameters())
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert set(ours) == set(wanted)
    for name, grad in ours.items():
        if name.endswith(OURS_ALONE):
            continue
        if name.endswith((".u", ".v")) and not reference.untie_r:
            # Theirs are shared by all layers.
            suffix = name[-len(".u") :]
            grad = sum(layer_grad for layer_name, layer_grad in ours.items() if layer_name.endswith(suffix))
        same([grad], [wanted[name]])
        assert grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("div_val", "dropped"),
    [(2, r"crit\.(out_layers\.\d\.weight|out_projs\.[12])"), (1, r"crit\.out_projs\.[12]"), (1, "nothing")],
)
@pytest.mark.parametrize(("suffix", "original"), [("bin", True), ("safetensors", False)])
def test_tied_weights_may_be_stored_once_or_twice(div_val, dropped, suffix, original, tmp_path):
    reference = Reference((3, 7), div_val, 8, tied=True, original=original)
    weights = {name: weight.detach() for name, weight in reference.weights().items()}
    stored = {}
    for name, weight in reference.named(weights).items():
        if not re.search(dropped, name):
            stored[name] = weight.clone()
    path = tmp_path / f"model.{suffix}"
    save = save_file if suffix == "safetensors" else torch.save
    save(stored, path)
    model = from_transfo_xl(load_weights(path), reference.config)
    assert model.config.adaptive.tie_weights
    assert model.config.adaptive.tie_projections
    tokens = torch.randint(0, reference.V, (5, 2))
    wanted, _ = reference.forward(weights, tokens, [])
    torch.testing.assert_close(model(tokens).logits, wanted)


def test_what_weights_dont_show_is_the_configs_or_our_default():
    reference, state = reference_and_state()
    config = from_transfo_xl(state, reference.config).config
    assert (config.mem_len, config.segment_len) == (8, 5)
    config = from_transfo_xl(state, {"pre_lnorm": False}).config
    assert (config.mem_len, config.segment_len, config.adaptive.cutoffs) == (64, 64, (3, 7))
    assert from_transfo_xl(state, {"pre_lnorm": True}).config.norm == "pre-without-final"
    assert from_transfo_xl(state_of(original=False)).config.norm == "post"


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
    changed = {name: weight for name, weight in (state_of() | change).items() if weight is not None}
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
        from_transfo_xl(state_of(div_val=1), {name: v for name, v in config.items() if v is not None})


def test_a_state_dict_of_another_model_is_an_error():
    with pytest.raises(ValueError, match=r"Transformer-XL, .* weight, bias"):
        from_transfo_xl(torch.nn.Linear(2, 2).state_dict())
