"""The vocabulary of a model of transformers: its embeddings, and another size of them."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

pytest.importorskip(
    "transformers", reason="transformers is not installed; use pip install '.[hf]' in a clone"
)

from memformers import AdaptiveConfig, MemoryLM
from memformers.integrations.huggingface import MemformerConfig, MemformerForCausalLM

pytestmark = pytest.mark.usefixtures("here")
TEXT = torch.arange(30).view(2, 15) ** 2 % 5  # ids below 5, which every size here has

ADAPTIVE = {"embedding": "adaptive", "adaptive": AdaptiveConfig(cutoffs=(4, 8))}


def build(*, tied=False, vocab_size=11, **settings):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 2, "d_ff": 16, "segment_len": 8, "mem_len": 8}
    config = MemformerConfig(vocab_size=vocab_size, tie_word_embeddings=tied, **sizes | settings)
    model = MemformerForCausalLM(config).eval()
    nn.init.normal_(model.model.head.bias)  # so that it matters
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_lora_leaves_out_the_head_and_is_merged_exactly(tied):
    peft = pytest.importorskip("peft", reason="peft is not installed; use pip install '.[hf]' in a clone")
    model = build(tied=tied)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    lora = peft.get_peft_model(model, config).eval()
    assert lora.peft_config["default"].target_modules == linear - {"model.head"}
    with torch.no_grad():
        logits = lora(input_ids=TEXT).logits
        merged = lora.merge_and_unload()(input_ids=TEXT).logits
    # Logits are sums of numbers around ten, of which float32 has seven digits.
    assert torch.allclose(merged, logits, atol=1e-4)
    assert (model.model.head.weight is model.model.embed.weight) is tied


@pytest.mark.parametrize("tied", [False, True])
def test_lora_on_an_adaptive_head_is_refused_in_a_line(tied):
    """They are read as one matrix, so an adapter would be left out."""
    peft = pytest.importorskip("peft", reason="peft is not installed; use pip install '.[hf]' in a clone")
    model = build(**ADAPTIVE | {"adaptive": AdaptiveConfig(cutoffs=(4, 8), tie_weights=tied)})
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="an adaptive vocabulary needs") as raised:
        lora(input_ids=TEXT)
    assert "\n" not in str(raised.value)


def test_embeddings_that_are_set_are_those_that_the_model_uses():
    model = build()
    assert model.get_input_embeddings() is model.model.embed
    assert model.get_output_embeddings() is model.model.head
    same = nn.Embedding.from_pretrained(torch.ones(11, 16))
    model.set_input_embeddings(same)
    assert torch.equal(model(TEXT).logits, model(TEXT + 3).logits)
    head = nn.Linear(16, 11)
    nn.init.zeros_(head.weight)
    model.set_output_embeddings(head)
    assert torch.equal(model(TEXT).logits, head.bias.expand(2, 15, 11))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [17, 7])
def test_a_resized_model_reads_the_same_and_can_be_loaded(size, tied, tmp_path):
    model = build(tied=tied)
    logits = model(TEXT).logits
    assert model.resize_token_embeddings(size) is model.get_input_embeddings()
    assert model.config.vocab_size == model.model.config.vocab_size == size
    assert (model.model.head.weight is model.model.embed.weight) is tied
    common = min(size, 11)
    resized = model(TEXT).logits
    assert resized.shape == (2, 15, size)
    assert torch.allclose(resized[..., :common], logits[..., :common], atol=1e-6)
    newest = torch.full((1, 9), size - 1)
    newest_logits = model(newest).logits
    assert newest_logits.isfinite().all()
    with pytest.raises(ValueError, match=f"vocab_size={size}"):
        model(newest + 1)
    model.save_pretrained(tmp_path)
    for loaded in (MemformerForCausalLM.from_pretrained(tmp_path).eval(), MemoryLM.from_pretrained(tmp_path)):
        lm = loaded if isinstance(loaded, MemoryLM) else loaded.model
        assert (lm.head.weight is lm.embed.weight) is tied
        with torch.no_grad():
            segments = lm(newest.T[:8]).logits
        assert torch.allclose(segments[:, 0], newest_logits[0, :8], atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_are_learned_and_generated(tied):
    model = build(tied=tied)
    model.resize_token_embeddings(13)
    text = torch.full((4, 20), 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model.train()
    for _ in range(20):
        optimizer.zero_grad()
        model(text, labels=text).loss.backward()
        optimizer.step()
    written = model.eval().generate(text[:1, :3], max_new_tokens=9, do_sample=False)
    assert written.tolist() == [[12] * 12]


def test_a_vocabulary_is_padded_to_a_multiple():
    model = build()
    model.resize_token_embeddings(pad_to_multiple_of=8)
    assert model(TEXT).logits.shape == (2, 15, 16)
    assert model.model.vocab_size == 16
    model.resize_token_embeddings(17, pad_to_multiple_of=8)
    assert model.model.vocab_size == len(model.model.head.weight) == len(model.model.embed.weight) == 24


def test_without_a_size_nothing_changes():
    model = build()
    logits = model(TEXT).logits
    assert model.resize_token_embeddings() is model.model.embed
    assert torch.equal(model(TEXT).logits, logits)
    assert model.model.vocab_size == 11


def test_new_weights_are_near_the_mean_of_the_old_ones():
    model = build()
    embed = model.model.embed.weight.detach().clone()
    head = model.model.head.weight.detach().clone()
    bias = model.model.head.bias.detach().clone()
    model.resize_token_embeddings(15)
    assert torch.allclose(model.model.embed.weight[11:], embed.mean(0).expand(4, 16), atol=1e-3)
    assert torch.allclose(model.model.head.weight[11:], head.mean(0).expand(4, 16), atol=1e-3)
    assert torch.allclose(model.model.head.bias[11:], bias.mean().expand(4), atol=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_new_weights_without_a_mean_are_those_of_a_new_model(tied):
    model = build(tied=tied)
    fresh = build(tied=tied, vocab_size=3000).model
    logits = model(TEXT).logits
    model.resize_token_embeddings(3000, mean_resizing=False)
    for resized, drawn in ((model.model.embed, fresh.embed), (model.model.head, fresh.head)):
        assert resized.weight[11:].std().item() == pytest.approx(drawn.weight.std().item(), rel=0.02)
        assert abs(resized.weight[11:].mean().item()) < 0.01
    assert not model.model.head.bias[11:].any()
    assert torch.allclose(model(TEXT).logits[..., :11], logits, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "change", "arguments", "message"),
    [
        (ADAPTIVE, None, {"new_num_tokens": 13}, "embedding='plain'"),
        ({}, "parametrize", {"new_num_tokens": 13}, "before they are changed"),
        ({}, "prune", {"new_num_tokens": 13}, "before they are changed"),
        ({}, None, {"new_num_tokens": 0}, "at least 1, got 0"),
    ],
)
def test_what_cant_be_resized_is_refused_and_stays_as_it_is(settings, change, arguments, message):
    model = build(**settings)
    if change == "parametrize":
        nn.utils.parametrizations.weight_norm(model.model.head)
    elif change == "prune":
        prune.l1_unstructured(model.model.embed, "weight", 0.2)
    logits = model(TEXT).logits
    with pytest.raises(ValueError, match=message) as raised:
        model.resize_token_embeddings(**arguments)
    assert "\n" not in str(raised.value)
    assert torch.equal(model(TEXT).logits, logits)
    assert model.config.vocab_size == model.model.vocab_size == 11
