#!/bin/sh
# transformers 5.24.0, torch 2.13.0: some recurrent models read a text in two calls differently than in one.
#
# A cache continues a text; whether the rest is one token or several should make no difference, and for Llama,
# Mamba-2, LFM2 and GraniteMoeHybrid it makes none. Mamba, FalconMamba and Jamba continue from a cache only token by
# token: several tokens in one call start from an empty recurrent state, and the logits are others, without an
# error. So reading a long prompt in chunks, or a dialogue turn by turn, is silently wrong.
# Guess: all models of the library continue from their cache.
# Output seen: token by token, all agree; in one call, Llama, Mamba2, Lfm2, GraniteMoeHybrid agree, and Mamba,
# FalconMamba, Jamba differ
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers

transformers.logging.set_verbosity_error()
WIDTHS = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
SSM = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
MODELS = {
    "Llama": ATTENTION,
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "Lfm2": ATTENTION | {"layer_types": ["conv", "full_attention"]},
    "GraniteMoeHybrid": ATTENTION
    | SSM
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 32},
    "Mamba": {"state_size": 8},
    "FalconMamba": {"state_size": 8},
    "Jamba": ATTENTION
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 1}
    | {"use_mamba_kernels": False, "mamba_dt_rank": 4},
}
ids = torch.randint(50, (1, 24), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def differences(name, settings):
    """Of logits after 12 ids, read in one call and token by token, from those of one call for all."""
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**WIDTHS, **settings)
    model = getattr(transformers, name + "ForCausalLM")(config).eval()
    for weight in model.parameters():  # so that a difference shows
        if weight.dim() > 1:
            weight.mul_(5)
    expected = model(ids).logits[:, 12:]
    scale = expected.std()
    cache = model(ids[:, :12], use_cache=True).cache
    in_one = model(ids[:, 12:], cache=cache, use_cache=True).logits
    cache = model(ids[:, :12], use_cache=True).cache
    by_token = []
    for i in range(12, 24):
        output = model(ids[:, i : i + 1], cache=cache, use_cache=True)
        cache = output.cache
        by_token.append(output.logits)
    errors = [(x - expected).abs().max() / scale for x in (in_one, torch.cat(by_token, dim=1))]
    return [error.item() for error in errors]


agree, differ = [], []
for name, settings in MODELS.items():
    in_one, by_token = differences(name, settings)
    assert by_token < 1e-4, (name, by_token)
    (agree if in_one < 1e-4 else differ).append(name)
    assert in_one < 1e-4 or in_one > 1e-3, (name, in_one)
print(f"token by token, all agree; in one call, {', '.join(agree)} agree, and {', '.join(differ)} differ")
assert agree == ["Llama", "Mamba2", "Lfm2", "GraniteMoeHybrid"], agree
assert differ == ["Mamba", "FalconMamba", "Jamba"], differ
PYTHON
