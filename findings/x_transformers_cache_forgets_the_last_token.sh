#!/bin/sh
# x-transformers 2.31.10, torch 2.13.0: with shifted tokens or data-dependent ALiBi, cached generation is wrong.
#
# shift_tokens=1 gives half of each layer's features from the token before. A cached step has one token, and gets
# zeros instead; so does the first token of a segment after a memory. attn_data_dependent_alibi, the
# Forgetting Transformer's gates, adds gates up over the keys; a cached step has the gates of one token only. Both models
# say that they can use a cache, and generate uses it by default: it writes other tokens than the model it is called on.
# generate(cache_kv=False) is right.
# Guess: an option that a cache can't serve turns it off, as selective attention does, or raises.
# Output seen: of 32 tokens, written otherwise with a cache: rotary 0, shift_tokens 21, data-dependent ALiBi 15;
# second segment after a memory: rotary equal, shift_tokens not
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 x-transformers==2.31.10 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

OPTIONS = {"rotary": {}, "shift_tokens": {"shift_tokens": 1}, "data-dependent ALiBi": {"attn_data_dependent_alibi": True}}


def build(options):
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=True, **options)
    model = TransformerWrapper(
        num_tokens=50, max_seq_len=64, max_mem_len=64, use_abs_pos_emb=False, attn_layers=layers
    ).eval()
    assert model.can_cache_kv
    with torch.no_grad():
        for weight in model.parameters():  # so that a difference shows
            if weight.dim() > 1:
                weight.mul_(2)
    return model


def count_different(options):
    wrapper = AutoregressiveWrapper(build(options))
    with_cache = wrapper.generate(text[:, :8], 32, temperature=0.0)
    without = wrapper.generate(text[:, :8], 32, temperature=0.0, cache_kv=False)
    return (with_cache != without).sum().item()


@torch.no_grad()
def is_equal_after_memory(options):
    model = build(options)
    expected = model(text)[:, 8:]
    _, memory = model(text[:, :8], return_mems=True)
    second = model(text[:, 8:], mems=memory)
    return torch.allclose(second, expected, atol=1e-3)


text = torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(0))
n_different = {name: count_different(options) for name, options in OPTIONS.items()}
equal = [is_equal_after_memory(OPTIONS[name]) for name in ("rotary", "shift_tokens")]
shown = ", ".join(f"{name} {count}" for name, count in n_different.items())
print(
    f"of 32 tokens, written otherwise with a cache: {shown}; second segment after a memory: "
    f"rotary {'equal' if equal[0] else 'not'}, shift_tokens {'equal' if equal[1] else 'not'}"
)
assert n_different["rotary"] == 0, n_different
assert n_different["shift_tokens"] > 5, n_different
assert n_different["data-dependent ALiBi"] > 0, n_different
assert equal == [True, False], equal
PYTHON
