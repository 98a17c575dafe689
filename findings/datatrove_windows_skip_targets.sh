#!/bin/sh
# datatrove 0.10.1, torch 2.13.0: windows of a tokenized file don't overlap, so each window's first token is never predicted.
#
# DatatroveFileDataset(seq_len=n) returns n + 1 ids, to be split into n inputs and n targets. The next window starts
# after them, not at the last one. So the first id of each window is no target in any epoch, the last one no
# input, and a memory that is carried from window to window misses a token at each border. The positions, described as
# places within the document, start at 0 in each window, also in the middle of a document: a reader that takes 0 for a
# document's start resets there.
# Guess: windows share one token, so that each token but the first is a target once; positions count on.
# Output seen: of 19 tokens after the first, targets 16, missing 5 10 15; places of one document 0 1 2 3 4, 0 1 2 3 4,
# 0 1 2 3 4, 0 1 2 3 4
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 datatrove==0.10.1 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
from datatrove.utils.dataset import DatatroveFileDataset

N_TOKENS, SEQ_LEN = 20, 4

# One document, as datatrove's tokenizer writes it: the ids, and the place where the document ends.
np.arange(N_TOKENS, dtype=np.uint16).tofile("tokens.ds")
np.array([N_TOKENS], dtype=np.uint64).tofile("tokens.ds.index")
dataset = DatatroveFileDataset("tokens.ds", seq_len=SEQ_LEN, token_size=2, return_positions=True)
targets, places = [], []
for window in dataset:
    ids = window["input_ids"].tolist()
    assert len(ids) == SEQ_LEN + 1
    targets += ids[1:]
    places.append(" ".join(str(place) for place in window["positions"].tolist()))
    if len(places) == len(dataset):  # after its end, a data set starts over
        break
missing = sorted(set(range(1, N_TOKENS)) - set(targets))
print(
    f"of {N_TOKENS - 1} tokens after the first, targets {len(targets)}, missing {' '.join(map(str, missing))}; "
    f"places of one document {', '.join(places)}"
)
assert missing == [5, 10, 15], missing
assert places == ["0 1 2 3 4"] * 4, places
PYTHON
