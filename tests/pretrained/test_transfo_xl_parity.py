"""The original Transformer-XL's weights in our model, against the original written from its equations, in
double precision; and files that hold them, or worse."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from memformers import from_transfo_xl, load_weights
from memformers.generation.decoding import Decoder
from memformers.pretrained.transfo_xl import converted
from tests.builders import Bomb
from tests.pretrained.transfo_xl_reference import Reference

VOCABULARIES = list(itertools.product([(), (3, 7)], [1, 2], [12, 8], [False, True]))
LAYOUTS = list(itertools.product([False, True], repeat=3))


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def compare_gradients(model, reference, gradients):
    """Every parameter's: their gradients go through the same map as their weights."""
    wanted, _ = converted(reference.named(gradients), reference.config)
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert set(ours) == set(wanted)
    for name, grad in ours.items():
        if name.endswith(("self_attn.value.bias", "self_attn.output.bias")):
            continue  # which the original doesn't have
        if name.endswith((".u", ".v")) and not reference.untie_r:
            part = name.rpartition(".")[2]
            grad = sum(ours[f"transformer.layers.{i}.self_attn.{part}"] for i in range(reference.layers))
        close(grad, wanted[name])
        assert grad.abs().sum() > 0


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("cutoffs", "div_val", "d_embed", "tied"), VOCABULARIES)
@pytest.mark.parametrize(("untie_r", "original", "pre_lnorm"), LAYOUTS)
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
    leaves = list({id(t): t for t in weights.values()}.values())
    grads = dict(zip(map(id, leaves), torch.autograd.grad(their_loss, leaves), strict=True))
    compare_gradients(model, reference, {name: grads[id(t)] for name, t in weights.items()})


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("clamp_len", [4, 100])
@pytest.mark.parametrize("same_length", [False, True])
@pytest.mark.parametrize("mem_len", [8, 3])
@pytest.mark.parametrize("pre_lnorm", [False, True])
def test_distances_are_clamped_and_cut_as_the_config_says_by_segment_and_by_token(
    clamp_len, same_length, mem_len, pre_lnorm
):
    lengths = {"clamp_len": clamp_len, "same_length": same_length, "mem_len": mem_len}
    reference = Reference((3, 7), 2, tied=True, pre_lnorm=pre_lnorm, **lengths)
    weights = reference.weights()
    model = from_transfo_xl(reference.named(weights), reference.config)
    one_by_one, in_portions, mems, memory = Decoder(model, 2), Decoder(model, 2), [], None
    for _ in range(4):
        tokens = torch.randint(0, reference.V, (5, 2))
        wanted, mems = reference.forward(weights, tokens, mems)
        logits, memory, _ = model(tokens, memory)
        close(logits, wanted)
        close(list(memory.mem), mems)
        close(torch.stack([one_by_one.read(token[None]) for token in tokens]), wanted.detach())
        close(in_portions.read(tokens[:2]), wanted[1].detach())
        close(in_portions.read(tokens[2:]), wanted[4].detach())


@pytest.mark.parametrize("kept", ["word_emb", "crit", "both"])
@pytest.mark.parametrize("suffix", ["bin", "pt", "safetensors"])
@pytest.mark.parametrize("original", [False, True])
def test_files_in_single_precision_give_the_same_model_however_what_is_tied_was_saved(
    kept, suffix, original, tmp_path
):
    reference = Reference((3, 7), 2, 8, tied=True, original=original)
    weights = {name: t.detach() for name, t in reference.weights().items()}
    dropped = {"crit": "word_emb.emb_layers", "word_emb": "crit.out_layers", "both": "nothing"}[kept]
    state = {
        name: tensor.clone()
        for name, tensor in reference.named(weights).items()
        if not (dropped in name and name.endswith(".weight"))
    }
    path = tmp_path / f"model.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    model = from_transfo_xl(load_weights(path), reference.config)
    assert model.config.adaptive.tie_weights
    tokens = torch.randint(0, reference.V, (5, 2))
    logits = model(tokens).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference.forward(weights, tokens, [])[0])


def test_memory_and_segment_lengths_are_the_configs_or_our_defaults():
    reference = Reference(cutoffs=(3, 7), div_val=2)
    state = reference.named(reference.weights())
    config = from_transfo_xl(state, reference.config).config
    assert (config.mem_len, config.segment_len) == (8, 5)
    config = from_transfo_xl(state, {"pre_lnorm": False}).config
    assert (config.mem_len, config.segment_len, config.adaptive.cutoffs) == (64, 64, (3, 7))


def test_weights_of_the_original_are_not_taken_without_saying_where_they_normalize():
    reference = Reference(cutoffs=(3, 7), div_val=2)
    state = reference.named(reference.weights())
    said = {name: value for name, value in reference.config.items() if name != "pre_lnorm"}
    with pytest.raises(ValueError, match=r"got pre_lnorm=None; give it, as in config=\{'pre_lnorm'"):
        from_transfo_xl(state, said)
    with pytest.raises(ValueError, match="got pre_lnorm='no'"):
        from_transfo_xl(state, said | {"pre_lnorm": "no"})
    assert from_transfo_xl(state, said | {"pre_lnorm": True}).config.norm == "pre-without-final"
    theirs = Reference(cutoffs=(3, 7), div_val=2, original=False)
    assert from_transfo_xl(theirs.named(theirs.weights()), said).config.norm == "post"


def test_a_dropout_of_attention_that_is_not_taken_over_is_said():
    reference = Reference(cutoffs=(3, 7), div_val=2)
    state, config = reference.named(reference.weights()), reference.config | {"dropout": 0.1}
    with pytest.warns(UserWarning, match=r"dropatt=0\.0 is not used: .* dropout=0\.1 applies to attention"):
        from_transfo_xl(state, config | {"dropatt": 0.0})
    from_transfo_xl(state, config | {"dropatt": 0.1})


def test_weights_that_do_not_fit_are_named():
    reference = Reference(cutoffs=(3, 7), div_val=2)
    state = reference.named(reference.weights())
    with pytest.raises(ValueError, match=r"expected .* Transformer-XL, .* weight, bias"):
        from_transfo_xl(torch.nn.Linear(2, 2).state_dict())
    for change, message in (
        ({"layers.1.dec_attn.o_net.weight": None}, r"missing: layers\.1\.dec_attn\.o_net\.weight\.$"),
        ({"layers.0.dec_attn.q_net.weight": torch.ones(2)}, r"unexpected: layers\.0\.dec_attn\.q_net"),
        (
            {"layers.1.pos_ff.CoreNet.0.bias": torch.ones(9)},
            r"layers\.1\.pos_ff\.CoreNet\.0\.bias is \[9\], not \[16\]",
        ),
        (
            {"word_emb.emb_layers.0.weight": torch.ones(3)},
            r"emb_layers\.0\.weight to have 2 dimensions, got \[3\]",
        ),
        ({"r_w_bias": None}, r"the weights lack layers\.0\.dec_attn\.r_w_bias"),
        ({"r_w_bias": torch.ones(2, 4)}, r"n_head=2 times d_head=4 must equal d_model=12"),
        (
            {"crit.out_layers.1.bias": torch.ones(4, dtype=torch.int8)},
            r"crit\.out_layers\.1\.bias is torch\.int8, no floating-point tensor",
        ),
        ({"crit.cluster_bias": torch.ones(1)}, r"have 1 clusters of rare words, and cutoffs=\[3, 7\] make 2"),
    ):
        changed = {name: t for name, t in (state | change).items() if t is not None}
        with pytest.raises(ValueError, match=message) as error:
            from_transfo_xl(changed, {"pre_lnorm": False})
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"have 2 clusters of rare words, and cutoffs=\[\] make 0; give those of the model"),
        ({"cutoffs": [3, 30]}, r"cutoffs=\(3, 30\)"),
        ({"cutoffs": 3}, "cutoffs=3"),
        ({"n_head": 4}, r"n_head=3, .* n_head=4"),
        ({"tie_projs": True}, "tie_projs=True"),
        ({"attn_type": 2}, r"attn_type=0, .* attn_type=2"),
        ({"mem_len": "long"}, "mem_len='long'"),
        ({"mem_len": -1}, "mem_len=-1"),
        ({"dropout": "0.1"}, "dropout='0.1'"),
    ],
)
def test_a_config_of_another_model_is_an_error(config, message):
    reference = Reference(cutoffs=(3, 7))
    with pytest.raises(ValueError, match=message):
        from_transfo_xl(
            reference.named(reference.weights()),
            {"pre_lnorm": False} | (({"cutoffs": [3, 7]} | config) if config else config),
        )


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth"])
def test_a_pickle_that_would_run_code_is_refused_and_runs_none(suffix, tmp_path):
    path, exploded = tmp_path / f"model.{suffix}", tmp_path / "sprung"
    torch.save({"weight": torch.ones(2), "bomb": Bomb(exploded)}, path)
    with pytest.raises(ValueError, match=r"is refused: loading it would run code \(\w+\.mkdir\)") as error:
        load_weights(path)
    assert "\n" not in str(error.value)
    assert not exploded.exists()
    # Unsafe on purpose: this file was made above, and its code only makes a folder. Without this check, a
    # file whose code never runs would pass the test.
    torch.load(path, weights_only=False)
    assert exploded.exists()


def test_files_without_weights_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.bin .* is missing"):
        load_weights(tmp_path / "none.bin")
    for name, content, message in (
        ("list.bin", [1, 2], "state dict of tensors, got a list"),
        ("numbers.bin", {3: torch.ones(2)}, "holds more than tensors: 3; save"),
        ("run.bin", {"state_dict": {}, "epoch": 3}, "holds more than tensors: state_dict, epoch; save"),
    ):
        torch.save(content, tmp_path / name)
        with pytest.raises(ValueError, match=message):
            load_weights(tmp_path / name)
    for name in ("text.bin", "text.safetensors"):
        (tmp_path / name).write_text("no weights\n")
        with pytest.raises(ValueError, match=rf"text\.{name[5:]} can't be read as"):
            load_weights(tmp_path / name)


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_a_broken_file_is_an_error_or_the_tensors_and_nothing_else(suffix, tmp_path):
    path = tmp_path / f"model.{suffix}"
    state = {"a": torch.randn(7, 3), "b": torch.randn(5)}
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    whole, refused = path.read_bytes(), []
    generator = torch.Generator().manual_seed(0)
    broken = [whole[: len(whole) * part // 20] for part in range(20)]
    for at in torch.randint(0, len(whole), (200,), generator=generator).tolist():
        broken.append(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
    for content in broken:
        path.write_bytes(content)
        try:
            loaded = load_weights(path)
        except ValueError as error:
            loaded, refused = {}, [*refused, str(error)]
        assert all(isinstance(tensor, torch.Tensor) for tensor in loaded.values())
    assert len(refused) >= 20  # the truncated ones at least
    assert not [message for message in refused if "\n" in message]
