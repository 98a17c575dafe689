#!/bin/sh
# transformers 5.24.0, tokenizers 0.23.3: save_pretrained saves the truncation and padding of the last call.
#
# Truncation and padding look like arguments of one call. A fast tokenizer sets them in the tokenizer inside, where
# they stay until the next call, and save_pretrained writes that to tokenizer.json. transformers resets them when
# it reads the file; every other reader of it, such as tokenizers.Tokenizer.from_file, cuts all texts to the length
# of the last call, without a message. A call with other arguments before saving removes them.
# Guess: a call leaves no trace in what is saved.
# Output seen: Tokenizer.from_file reads 2 of 5 tokens; AutoTokenizer reads 5; saved after a plain call 5
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile transformers==5.24.0 tokenizers==0.23.3
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

inner = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
tokenizer("a b a b a", truncation=True, max_length=2)
tokenizer.save_pretrained("cut")
by_file = len(Tokenizer.from_file("cut/tokenizer.json").encode("a b a b a").ids)
by_auto = len(transformers.AutoTokenizer.from_pretrained("cut")("a b a b a").input_ids)
tokenizer("a b a b a")
tokenizer.save_pretrained("whole")
whole = len(Tokenizer.from_file("whole/tokenizer.json").encode("a b a b a").ids)
print(f"Tokenizer.from_file reads {by_file} of 5 tokens; AutoTokenizer reads {by_auto}; saved after a plain call {whole}")
assert (by_file, by_auto, whole) == (2, 5, 5)
PYTHON
