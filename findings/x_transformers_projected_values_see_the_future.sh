#!/bin/sh
# x-transformers 2.31.10, torch 2.13.0: with attn_orthog_projected_values, a causal decoder sees later tokens.
#
# The option subtracts from attention's output its part along the values. It takes that part once for the whole text,
# not for each token, so each output depends on all values, also those of later tokens. A Decoder then gives
# other logits for a text when the text after it changes: the training loss is too low, and generation, which has no later
# tokens, runs another model. attn_orthog_projected_values_per_head does the same.
# Guess: a Decoder is causal with every option, and the projection is per token.
# Output seen: logits of 12 tokens change with later tokens: plain False, projected True, projected per head True
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 x-transformers==2.31.10 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from x_transformers import Decoder, TransformerWrapper

OPTIONS = {
    "plain": {},
    "projected": {"attn_orthog_projected_values": True},
    "projected per head": {"attn_orthog_projected_values_per_head": True},
}


@torch.no_grad()
def sees_future(options):
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=1, heads=2, rotary_pos_emb=True, **options)
    model = TransformerWrapper(num_tokens=50, max_seq_len=64, use_abs_pos_emb=False, attn_layers=layers).eval()
    scale = model(text).std()
    changes = (model(text)[:, :12] - model(changed)[:, :12]).abs().max() / scale
    assert changes < 1e-5 or changes > 1e-2, changes
    return changes.item() > 1e-2


text = torch.randint(50, (1, 24), generator=torch.Generator().manual_seed(0))
changed = text.clone()
changed[:, 12:] = (text[:, 12:] + 1) % 50
results = {name: sees_future(options) for name, options in OPTIONS.items()}
shown = ", ".join(f"{name} {result}" for name, result in results.items())
print(f"logits of 12 tokens change with later tokens: {shown}")
assert list(results.values()) == [False, True, True], results
PYTHON
