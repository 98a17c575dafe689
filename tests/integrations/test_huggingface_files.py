"""Files of models and tokenizers that transformers and we write for each other."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip(
    "transformers", reason="transformers is not installed; use pip install '.[hf]' in a clone"
)

import transformers

from memformers import MemoryLM
from memformers.data.builtin import write_play
from memformers.data.tokenizer import ByteTokenizer
from memformers.data.tokenizers import build_tokenizer
from memformers.integrations import huggingface
from memformers.integrations.huggingface import MemformerForCausalLM
from memformers.runs.load import load_checkpoint, load_model_tokenizer
from memformers.training.initial_weights import load_initial
from tests.integrations.adapters import PROMPTS, wrapped

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("tied", [False, True])
def test_auto_classes_load_what_was_saved(tied, tmp_path):
    adapter, lm = wrapped(mem_len=(5, 6))
    if tied:
        lm.head.weight = lm.embed.weight
        adapter.config.tie_word_embeddings = True
    adapter.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is MemformerForCausalLM
    assert again.model.config == lm.config
    assert (again.model.head.weight is again.model.embed.weight) is tied
    # Mapped from the file, tensors may be unaligned, and rounding is another one.
    for parameter in again.parameters():
        parameter.data = parameter.data.clone()
    assert torch.equal(again(PROMPTS[1][None]).logits, adapter(PROMPTS[1][None]).logits)
    assert MemformerForCausalLM.from_pretrained(tmp_path, mem_len=3).model.config.mem_len == 3
    huggingface.tokenizer_of(build_tokenizer("character", "abcdefghijk")).save_pretrained(tmp_path)
    ours, _ = load_checkpoint(tmp_path, torch.device("cpu"))
    assert (ours.head.weight is ours.embed.weight) is tied
    assert torch.equal(ours(PROMPTS[1][:, None]).logits, lm(PROMPTS[1][:, None]).logits)


def test_a_missing_weight_is_refused(tmp_path):
    adapter, _ = wrapped()
    adapter.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.transformer.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing_keys model\.transformer\.norm\.weight"):
        MemformerForCausalLM.from_pretrained(tmp_path)


def test_files_that_transformers_wrote_are_loaded_everywhere(tmp_path):
    model, tokenizer = huggingface.load("compressive-shakespeare")
    model.save_pretrained(tmp_path / "theirs")
    model.model.save_pretrained(tmp_path / "ours")
    prompt = "The king\n\n  and 3: 'tis"
    expected = tokenizer(prompt).input_ids
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        tokenizer.save_pretrained(folder)
        for lm, tokens in (load_checkpoint(folder, torch.device("cpu")), load_initial(str(folder))):
            assert not lm.training
            assert lm.config == model.model.config
            assert all(map(torch.equal, lm.parameters(), model.parameters()))
            assert tokens.vocab_size == 65
            assert tokens.encode(prompt).tolist() == expected
            assert tokens.decode(torch.tensor(expected)) == prompt
        assert all(map(torch.equal, MemoryLM.from_pretrained(folder).parameters(), model.parameters()))
    with pytest.raises(ValueError, match="the tokenizer can't divide the text"):
        tokens.encode("naïve")
    theirs = tmp_path / "theirs"
    again = transformers.AutoTokenizer.from_pretrained(theirs)
    batch = again(["ROMEO:\n", "O, she doth teach the torches"], return_tensors="pt", padding=True)
    assert batch["attention_mask"].sum(1).tolist() == [7, 29]
    assert again.decode(again(prompt)["input_ids"]) == prompt
    assert transformers.AutoModelForCausalLM.from_pretrained(theirs)(**batch).logits.isfinite().all()
    settings = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(settings | {"d_ff": 100}))
    with pytest.raises(ValueError, match=r"model\.safetensors doesn't contain the weights"):
        load_checkpoint(theirs, torch.device("cpu"))


@pytest.mark.parametrize("name", ["character", "byte", "word", "bpe"])
def test_a_tokenizer_saved_by_transformers_has_the_same_ids(name, tmp_path):
    text = write_play(3_000) + ("" if name == "character" else "\r\nnaïve – Ā 北京\n")
    tokenizer = ByteTokenizer() if name == "byte" else build_tokenizer(name, text, 300)
    theirs = huggingface.tokenizer_of(tokenizer)
    assert theirs(text)["input_ids"] == tokenizer.ids(text).tolist()
    assert theirs.pad_token_id == tokenizer.vocab_size
    expected = tokenizer.decode(tokenizer.encode(text))
    assert theirs.decode(theirs(text)["input_ids"]) == expected
    theirs.save_pretrained(tmp_path)
    ours = load_model_tokenizer(tmp_path, tokenizer.vocab_size)
    assert ours.vocab_size == tokenizer.vocab_size
    assert ours.ids(text).tolist() == tokenizer.ids(text).tolist()
    assert ours.decode(tokenizer.encode(text)) == expected
    assert "".join(map(ours.decoder(), tokenizer.ids(text).tolist())) == expected
