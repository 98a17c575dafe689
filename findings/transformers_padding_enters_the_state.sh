#!/bin/sh
# transformers 5.24.0, torch 2.13.0: left padding changes what RecurrentGemma and RWKV read, and what MiniMax generates.
#
# A batch of prompts is padded at the left, and attention_mask says where. Llama, Mamba and LFM2 then give the logits
# of the prompt alone. RWKV accepts the mask, and its state reads the padding all the same. RecurrentGemma's does, too,
# unless position_ids start at 0 after the padding, as generate passes them. MiniMax's logits of the prompt are
# right, but the state that it carries into generation isn't. There is no error: the logits of a text depend on the
# longest text of its batch.
# Guess: a model that accepts attention_mask hides what it masks.
# Output seen: padding changes logits of RecurrentGemma, Rwkv; in generation, of Rwkv, MiniMax; with positions,
# RecurrentGemma is equal: True
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
N_PADDED, LENGTH = 5, 12
WIDTHS = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
MIXED = ATTENTION | {"layer_types": ["linear_attention", "full_attention"]}
MODELS = {
    "Llama": ATTENTION,
    "Mamba": {"state_size": 8},
    "Lfm2": ATTENTION | {"layer_types": ["conv", "full_attention"]},
    "RecurrentGemma": ATTENTION
    | {"lru_width": 32, "attention_window_size": 64, "block_types": ["recurrent", "attention"], "head_dim": 8},
    "Rwkv": {"attention_hidden_size": 32, "intermediate_size": 64, "context_length": 64},
    "MiniMax": MIXED | {"head_dim": 8, "block_size": 8, "num_local_experts": 2, "num_experts_per_tok": 2},
}


def build(name):
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**WIDTHS, **MODELS[name])
    model = getattr(transformers, name + "ForCausalLM")(config).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for weight in model.parameters():  # so that a difference shows
            if weight.dim() > 1:
                weight.mul_(5)
    return model


@torch.no_grad()
def compare(model):
    """Whether logits of the text, and of the tokens after it, stay the same with padding before the text."""
    expected = model(text).logits
    logits = model(padded, attention_mask=mask).logits[:, N_PADDED:]
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    alone = torch.stack(model.generate(text, **settings).logits)
    written = torch.stack(model.generate(padded, attention_mask=mask, **settings).logits)
    errors = [(logits - expected).abs().max() / expected.std(), (written - alone).abs().max() / alone.std()]
    return [error.item() < 1e-3 for error in errors]


@torch.no_grad()
def compare_positions(model, positions):
    logits = model(padded, attention_mask=mask, position_ids=positions).logits[:, N_PADDED:]
    return torch.allclose(logits, model(text).logits, atol=1e-3)


text = torch.randint(1, 50, (1, LENGTH), generator=torch.Generator().manual_seed(0))
padded = torch.cat([torch.zeros(1, N_PADDED, dtype=torch.long), text], dim=1)
mask = (torch.arange(N_PADDED + LENGTH) >= N_PADDED).long()[None]
results = {name: compare(build(name)) for name in MODELS}
reading = [name for name, (is_equal, _) in results.items() if not is_equal]
generation = [name for name, (_, is_equal) in results.items() if not is_equal]
positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
with_positions = compare_positions(build("RecurrentGemma"), positions)
print(
    f"padding changes logits of {', '.join(reading)}; in generation, of {', '.join(generation)}; "
    f"with positions, RecurrentGemma is equal: {with_positions}"
)
assert with_positions
assert reading == ["RecurrentGemma", "Rwkv"], results
assert generation == ["Rwkv", "MiniMax"], results
PYTHON
