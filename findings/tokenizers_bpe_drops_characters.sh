#!/bin/sh
# tokenizers 0.23.3: a byte-level BPE drops every byte that its training text lacked, and byte_fallback alone does too.
#
# "Byte-level" is taken to mean that every text has tokens. The trainer's alphabet is what it has seen, unless
# initial_alphabet=ByteLevel.alphabet() is passed; the model has no unknown token, and what it doesn't know is left
# out: decode(encode(x)) is shorter than x, without an error. WordLevel, WordPiece and Unigram raise an error there.
# BPE(byte_fallback=True) without the 256 byte tokens in its vocabulary drops the same way.
# Guess: byte-level tokenization is lossless, and unknown characters are an error without an unknown token.
# Output seen: 'hello Zurich!' -> 'hello rh'; with the alphabet 'hello Zurich!'; byte_fallback 'acb' -> 'ab'; WordLevel
# raises
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile tokenizers==0.23.3
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def round_trip(alphabet):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["hello world"], trainer)
    return tokenizer.decode(tokenizer.encode("hello Zurich!").ids)


seen_only = round_trip([])
every_byte = round_trip(pre_tokenizers.ByteLevel.alphabet())
fallback = Tokenizer(models.BPE({"a": 0, "b": 1}, [], byte_fallback=True)).encode("acb").tokens
try:
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="?")).encode("c")
    by_word = "drops"
except Exception:
    by_word = "raises"
print(
    f"'hello Zurich!' -> {seen_only!r}; with the alphabet {every_byte!r}; byte_fallback 'acb' -> "
    f"{''.join(fallback)!r}; WordLevel {by_word}"
)
assert seen_only == "hello rh"
assert every_byte == "hello Zurich!"
assert fallback == ["a", "b"]
assert by_word == "raises"
PYTHON
