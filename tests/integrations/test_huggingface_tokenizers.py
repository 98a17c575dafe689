"""Our tokenizers in transformers, where texts contain the names of special tokens."""

import json

import pytest
import torch

pytest.importorskip(
    "transformers", reason="transformers is not installed; use pip install '.[hf]' in a clone"
)

import transformers
from tokenizers import Tokenizer, models, processors

from memformers.data.tokenizer import ByteTokenizer
from memformers.data.tokenizers import SubwordTokenizer, build_tokenizer
from memformers.integrations import huggingface
from memformers.integrations.huggingface import MemformerConfig, MemformerForCausalLM

pytestmark = pytest.mark.usefixtures("here")
KINDS = ("character", "frequency", "byte", "word", "bpe", "subword")
TEXT = "A <pad> is<pad>not <eos> a <unk> [CLS]\r\nthe<eos>end <|end|> of</s>it<pad"
LEARNED = TEXT + "\n" + "".join(map(chr, range(0x1B, 0x7F))) + " <<pad>> < p a d >\n"


def build(kind):
    """A tokenizer of ours; a subword one of a ``tokenizer.json`` has its own special tokens."""
    if kind == "byte":
        return ByteTokenizer()
    if kind != "subword":
        return build_tokenizer(kind, LEARNED, 280 if kind == "bpe" else None)
    inner = Tokenizer.from_str(json.dumps(build_tokenizer("bpe", LEARNED, 280).to_json()))
    inner.add_special_tokens(["<|end|>", "[CLS]"])
    inner.add_tokens(["<eos>"])
    return SubwordTokenizer(inner.to_str())


@pytest.fixture(params=KINDS)
def pair(request):
    """A tokenizer of ours, and the same in transformers."""
    tokenizer = build(request.param)
    return tokenizer, huggingface.tokenizer_of(tokenizer)


def test_a_text_with_the_names_of_special_tokens_has_its_own_ids(pair):
    tokenizer, theirs = pair
    for text in (TEXT, theirs.pad_token, f"{theirs.pad_token}end", f"the end of {theirs.pad_token}\n" * 2):
        expected = tokenizer.ids(text).tolist()
        assert theirs(text)["input_ids"] == theirs.encode(text) == expected
        assert theirs.convert_tokens_to_ids(theirs.tokenize(text)) == expected
        assert theirs.decode(expected) == tokenizer.decode(torch.tensor(expected))


def test_texts_of_a_batch_are_padded_outside_of_the_vocabulary(pair):
    tokenizer, theirs = pair
    texts = [TEXT, f"a {theirs.pad_token}", "the end"]
    batch = theirs(texts, padding=True, return_tensors="pt")
    for ids, mask, text in zip(batch.input_ids, batch.attention_mask.bool(), texts, strict=True):
        assert ids[mask].tolist() == tokenizer.ids(text).tolist()
        assert (ids[~mask] == tokenizer.vocab_size).all()
    assert theirs.decode(batch.input_ids[1], skip_special_tokens=True) == theirs.decode(
        theirs(texts[1]).input_ids
    )


def test_a_saved_tokenizer_reads_the_names_the_same(pair, tmp_path):
    tokenizer, theirs = pair
    theirs.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again(TEXT)["input_ids"] == tokenizer.ids(TEXT).tolist()
    assert again.pad_token_id == tokenizer.vocab_size
    assert again.padding_side == "left"


def test_a_word_that_is_called_as_padding_stays_a_word():
    tokenizer = build("word")
    theirs = huggingface.tokenizer_of(tokenizer)
    number = tokenizer.vocabulary.index("<pad>")
    assert theirs("<pad> end")["input_ids"][0] == number < theirs.pad_token_id
    assert theirs.pad_token not in tokenizer.vocabulary


def test_special_tokens_stay_special_beside_a_name_of_padding():
    tokenizer = build("subword")
    theirs = huggingface.tokenizer_of(tokenizer)
    end = theirs.convert_tokens_to_ids("<|end|>")
    ids = theirs("a<|end|>b<pad>")["input_ids"]
    assert ids[1] == end
    assert theirs.decode(ids, skip_special_tokens=True) == "ab<pad>"
    as_text = theirs("<|end|><pad>", split_special_tokens=True)["input_ids"]
    assert end not in as_text
    assert theirs.decode(as_text) == "<|end|><pad>"


def test_new_special_tokens_are_read_by_a_resized_model():
    tokenizer = build("bpe")
    theirs = huggingface.tokenizer_of(tokenizer)
    theirs.add_special_tokens({"extra_special_tokens": ["<|user|>"]})
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 1, "d_ff": 16, "segment_len": 8, "mem_len": 8}
    model = MemformerForCausalLM(MemformerConfig(vocab_size=tokenizer.vocab_size, **sizes))
    model.resize_token_embeddings(len(theirs))
    for text in ("<|user|>the end", "<|user|>a <pad>"):
        batch = theirs(text, return_tensors="pt")
        assert batch.input_ids[0].tolist() == [tokenizer.vocab_size + 1, *tokenizer.ids(text[8:])]
        assert model(**batch).logits.shape[2] == tokenizer.vocab_size + 2


def test_padding_that_is_also_the_end_of_a_text_is_read_as_the_end():
    tokenizer = build("byte")
    theirs = huggingface.tokenizer_of(tokenizer)
    theirs.eos_token = theirs.pad_token
    assert theirs("a<pad>")["input_ids"] == [97, 256]


@pytest.mark.parametrize("separator", ["\x1c", "\x1f", "\x85", "\u2028", "\u3000", "\t \v", "\r"])
def test_words_are_cut_where_ours_are(separator):
    tokenizer = build_tokenizer("word", f"a b{separator}c a{separator}d\n")
    text = f"a{separator}b {separator} c{separator}"
    assert huggingface.tokenizer_of(tokenizer)(text)["input_ids"] == tokenizer.ids(text).tolist()


def test_a_template_adds_no_tokens_since_the_model_reads_none():
    inner = Tokenizer.from_str(json.dumps(build("subword").to_json()))
    cls = ("[CLS]", inner.token_to_id("[CLS]"))
    inner.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[cls])
    tokenizer = SubwordTokenizer(inner.to_str())
    assert huggingface.tokenizer_of(tokenizer)(TEXT)["input_ids"] == tokenizer.ids(TEXT).tolist()


def test_a_tokenizer_that_leaves_out_ids_is_refused_in_a_line():
    """Its padding would get the id of a token."""
    words = {"a": 0, "b": 1, "c": 3, "<unk>": 4}
    tokenizer = SubwordTokenizer(Tokenizer(models.WordLevel(words, unk_token="<unk>")).to_str())
    with pytest.raises(ValueError, match="tokens for all ids below 5") as raised:
        huggingface.tokenizer_of(tokenizer)
    assert "\n" not in str(raised.value)
