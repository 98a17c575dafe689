#!/bin/sh
# x-transformers 2.31.10, torch 2.13.0: padding lowers the loss of XLAutoregressiveWrapper.
#
# The wrapper splits texts into segments, takes the mean of each text's losses in a segment, and adds the segments'
# means, weighted by their length with padding. A segment of a text that is all padding counts as loss 0 instead of
# not at all, so the loss of a short text falls with the length of the longest text in its batch, and a short
# rest of a text weighs as much as a full segment. AutoregressiveWrapper, and this one when all fits into one segment,
# don't do that.
# Guess: ignored targets don't change the loss, as in cross_entropy.
# Output seen: 9 tokens 3.17; with 8 ignored after them 1.58, with 24 0.79; AutoregressiveWrapper 3.17, 3.17, 3.17
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 x-transformers==2.31.10 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper, XLAutoregressiveWrapper

IGNORED = 20


def build(segment_len):
    layers = Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=True)
    return TransformerWrapper(
        num_tokens=21, max_seq_len=segment_len, max_mem_len=100, use_abs_pos_emb=False, attn_layers=layers
    ).eval()


torch.manual_seed(0)
whole = build(64)
segments = build(8)
segments.load_state_dict(whole.state_dict())
plain = AutoregressiveWrapper(whole, ignore_index=IGNORED)
xl = XLAutoregressiveWrapper(segments, ignore_index=IGNORED)
text = torch.randint(20, (1, 9), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def losses(n_ignored):
    padded = torch.cat([text, torch.full((1, n_ignored), IGNORED)], dim=1)
    return xl(padded).item(), plain(padded).item()


of_xl, of_plain = zip(*[losses(n) for n in (0, 8, 24)], strict=True)
print(
    "9 tokens {:.2f}; with 8 ignored after them {:.2f}, with 24 {:.2f}; ".format(*of_xl)
    + "AutoregressiveWrapper {:.2f}, {:.2f}, {:.2f}".format(*of_plain)
)
assert max(of_plain) - min(of_plain) < 1e-4, of_plain
assert abs(of_xl[0] - of_plain[0]) < 1e-4, of_xl
assert abs(of_xl[1] - of_xl[0] / 2) < 1e-4, of_xl
assert abs(of_xl[2] - of_xl[0] / 4) < 1e-4, of_xl
PYTHON
