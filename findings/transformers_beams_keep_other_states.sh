#!/bin/sh
# transformers 5.24.0, torch 2.13.0: beam search of RecurrentGemma and MiniMax continues beams from other beams' states.
#
# After each token, beam search keeps the best beams and puts the cache's rows in their order. RecurrentGemma's
# recurrent state isn't in its cache, and MiniMax's cache leaves the states of linear attention where they were.
# Both then continue a beam from another one's state, without an error; RWKV refuses beam search instead. With
# use_cache=False, which reads all tokens again, the texts are others. Greedy search agrees in all models.
# Guess: generate with a cache writes what it writes without one, or refuses.
# Output seen: texts of 6 that differ from those without a cache: greedy 0 0 0 0; beams Llama 0, Mamba 0,
# RecurrentGemma 4, MiniMax 4
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
N_TEXTS = 6
WIDTHS = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8}
MODELS = {
    "Llama": ATTENTION,
    "Mamba": {"state_size": 8},
    "RecurrentGemma": ATTENTION
    | {"lru_width": 32, "attention_window_size": 64, "block_types": ["recurrent", "attention"]},
    "MiniMax": ATTENTION
    | {"layer_types": ["linear_attention", "full_attention"], "block_size": 8}
    | {"num_local_experts": 2, "num_experts_per_tok": 2},
}


def build(name, seed):
    torch.manual_seed(seed)
    config = getattr(transformers, name + "Config")(**WIDTHS, **MODELS[name])
    model = getattr(transformers, name + "ForCausalLM")(config).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for weight in model.parameters():  # so that a difference shows
            if weight.dim() > 1:
                weight.mul_(3)
    return model


def count_different(name, num_beams):
    n_different = 0
    for seed in range(N_TEXTS):
        model = build(name, seed)
        text = torch.randint(1, 50, (1, 6), generator=torch.Generator().manual_seed(seed))
        settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": num_beams}
        cached = model.generate(text, **settings)
        plain = model.generate(text, **settings, use_cache=False)
        n_different += not torch.equal(cached, plain)
    return n_different


greedy = {name: count_different(name, 1) for name in MODELS}
beams = {name: count_different(name, 4) for name in MODELS}
of_beams = ", ".join(f"{name} {count}" for name, count in beams.items())
of_greedy = " ".join(str(count) for count in greedy.values())
print(f"texts of {N_TEXTS} that differ from those without a cache: greedy {of_greedy}; beams {of_beams}")
assert set(greedy.values()) == {0}, greedy
assert beams["Llama"] == 0, beams
assert beams["Mamba"] == 0, beams
assert beams["RecurrentGemma"] > 0, beams
assert beams["MiniMax"] > 0, beams
PYTHON
