#!/bin/sh
# transformers 5.24.0, torch 2.13.0: Mamba takes past_key_values=output.past_key_values, and ignores it.
#
# In 5.24 the cache's name is "cache" for all models, and the old names are kept for a while: every output has both
# .past_key_values and .cache_params, but each forward renames only the one that the model had. The other is taken
# as one more keyword and dropped, so a generic loop that worked on Llama reads each token of a Mamba without its
# past, and the other way round, without an error. cache=output.cache is right for all.
# Guess: both old names work, or the wrong one is a TypeError, since the output has both.
# Output seen: Llama: cache used, past_key_values used, cache_params ignored; Mamba: cache used, past_key_values
# ignored, cache_params used
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import warnings

import torch
import transformers

warnings.simplefilter("ignore", FutureWarning)
transformers.logging.set_verbosity_error()
WIDTHS = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
MODELS = {"Llama": {"num_attention_heads": 4, "intermediate_size": 64}, "Mamba": {"state_size": 8}}
ids = torch.randint(50, (1, 12), generator=torch.Generator().manual_seed(0))
seen = {}
for name, settings in MODELS.items():
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**WIDTHS, **settings)
    model = getattr(transformers, name + "ForCausalLM")(config).eval()
    with torch.no_grad():
        without = model(ids[:, 11:]).logits
        expected = model(ids).logits[:, 11:]
        for key in ("cache", "past_key_values", "cache_params"):
            output = model(ids[:, :11], use_cache=True)
            logits = model(ids[:, 11:], use_cache=True, **{key: getattr(output, key)}).logits
            is_used = torch.allclose(logits, expected, atol=1e-4)
            assert is_used or torch.equal(logits, without)
            seen[name, key] = "used" if is_used else "ignored"
print("; ".join(f"{n}: " + ", ".join(f"{k} {x}" for (m, k), x in seen.items() if m == n) for n in MODELS))
assert [*seen.values()] == ["used", "used", "ignored", "used", "ignored", "used"], seen
PYTHON
