#!/bin/sh
# tokenizers 0.23.3: training from files reads each line as a text, and learns no token that contains a line break
# and something after it; training from an iterator of the same text does.
#
# A byte-level BPE that is trained with train(files) has no token for an empty line or for a line break with the
# indent that follows, since no pair crosses the end of a line. When it encodes, it gets whole texts, and there are
# such pieces. With train_from_iterator of whole texts, it learns them; source code becomes a sixth shorter.
# Models with the same settings on the same text then have losses per token that can't be compared.
# Guess: both ways see the same text and learn the same vocabulary.
# Output seen: tokens with a line break and more: files 0, iterator 5; length of the text in tokens: 5587, 4631
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile tokenizers==0.23.3
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

functions = []
for i in range(200):
    functions.append(f"def f{i}(x):\n    if x > {i}:\n        return x\n\n    return -x\n\n\n")
TEXT = "".join(functions)
Path("text.txt").write_text(TEXT)
LINE_BREAK = "Ċ"  # as byte-level tokens show it


def build():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)


def count_line_breaks(tokenizer):
    return sum(LINE_BREAK in token and len(token) > 1 for token in tokenizer.get_vocab())


of_files, trainer = build()
of_files.train(["text.txt"], trainer)
of_texts, trainer = build()
of_texts.train_from_iterator([TEXT], trainer)
n_tokens = [count_line_breaks(tokenizer) for tokenizer in (of_files, of_texts)]
lengths = [len(tokenizer.encode(TEXT)) for tokenizer in (of_files, of_texts)]
print(
    f"tokens with a line break and more: files {n_tokens[0]}, iterator {n_tokens[1]}; "
    f"length of the text in tokens: {lengths[0]}, {lengths[1]}"
)
assert n_tokens[0] == 0, n_tokens
assert n_tokens[1] >= 4, n_tokens
assert lengths[1] < 0.9 * lengths[0], lengths
PYTHON
