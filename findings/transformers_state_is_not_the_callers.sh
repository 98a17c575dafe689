#!/bin/sh
# transformers 5.24.0, torch 2.13.0: RWKV overwrites the state it is given, and RecurrentGemma's cache lacks its own.
#
# RWKV returns its state as a list of tensors, like an LSTM, and each call writes into those it was given: two
# continuations of one text from the same state differ, and a saved state is gone. Clone each tensor first.
# RecurrentGemma puts keys and values into the caller's cache, but the state of its recurrent layers into the model. If
# another text is read with a separate cache, the first text continues with its own keys and the other's state.
# Guess: a returned state isn't changed by later calls, and each cache holds everything of its text.
# Output seen: logits of one token after the same text, largest difference: RWKV, a second time from the same state 1.0,
# from cloned states 0.0; RecurrentGemma, after another text with its own cache 1.6, without another text 0.0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.24.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON' 2> log || { cat log; exit 1; }
import torch
from transformers import DynamicCache, RecurrentGemmaConfig, RecurrentGemmaForCausalLM, RwkvConfig, RwkvForCausalLM

torch.manual_seed(0)
torch.set_grad_enabled(False)
TEXT, OTHER = torch.randint(5, 20, (2, 1, 8))
TOKEN = torch.tensor([[7]])
rwkv = RwkvForCausalLM(
    RwkvConfig(
        vocab_size=32, hidden_size=16, attention_hidden_size=16, intermediate_size=32, num_hidden_layers=2
    )
).eval()
gemma = RecurrentGemmaForCausalLM(
    RecurrentGemmaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        lru_width=16,
        attention_window_size=32,
    )
).eval()
for parameter in gemma.parameters():
    parameter.normal_(std=0.3)  # at first, states hardly count


def rwkv_twice(pass_state):
    state = rwkv(TEXT, use_cache=True).state
    first, second = [rwkv(TOKEN, state=pass_state(state), use_cache=True).logits for _ in range(2)]
    return (first - second).abs().max().item()


def gemma_with_cache(other):
    """The logits after TEXT and TOKEN; between them, the model reads the other text, if there is one."""
    cache = DynamicCache(config=gemma.config)
    gemma(TEXT, use_cache=True, cache=cache)
    if other is not None:
        gemma(other, use_cache=True, cache=DynamicCache(config=gemma.config))
    return gemma(TOKEN, position_ids=torch.tensor([[8]]), use_cache=True, cache=cache).logits


same, cloned = rwkv_twice(lambda state: state), rwkv_twice(lambda state: [part.clone() for part in state])
exact = gemma(torch.cat([TEXT, TOKEN], dim=1), use_cache=False).logits[:, -1:]
between = (gemma_with_cache(OTHER) - exact).abs().max().item()
alone = (gemma_with_cache(None) - exact).abs().max().item()
print(
    f"logits of one token after the same text, largest difference: RWKV, a second time from the same state "
    f"{same:.1f}, from cloned states {cloned:.1f}; RecurrentGemma, after another text with its own cache "
    f"{between:.1f}, without another text {alone:.1f}"
)
assert same > 0.1 and cloned == 0.0, (same, cloned)
assert between > 0.1 and alone < 1e-4, (between, alone)
PYTHON
