#!/bin/sh
# memorizing-transformers-pytorch 0.4.1, torch 2.13.0: clear_memories_on_eos_token_id and on_sos never clear anything.
#
# MemorizingTransformer looks for the token after it has replaced the ids by their embeddings, and for the end of a
# text in the last layer's outputs: it asks whether a number in a vector equals the id, which doesn't happen. So
# each text is read with the memory of the texts before it, and a loss that should be of separate documents isn't.
# Calling knn_memories.clear_memory(rows) does clear.
# Guess: the rows whose text ended start with an empty memory.
# Output seen: entries after a text of 8 that ends with the token, and after a second one: 8 16;
# without the options 8 16; after clear_memory 0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 memorizing-transformers-pytorch==0.4.1 \
    faiss-gpu==1.15.1 einops-exts==0.0.4 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from memorizing_transformers_pytorch import MemorizingTransformer

START, END = 1, 2
torch.manual_seed(0)
text = torch.randint(3, 20, (1, 8))
text[0, 0] = START
text[0, -1] = END


@torch.no_grad()
def entries(**options):
    model = MemorizingTransformer(
        num_tokens=20, dim=16, depth=2, dim_head=8, heads=2, memorizing_layers=(2,), max_knn_memories=64,
        num_retrieved_memories=4, **options,
    ).eval()  # fmt: skip
    counts = []
    with model.knn_memories_context(batch_size=1) as memories:
        for _ in range(2):
            model(text, memories)
            counts.append(memories[0].knns[0].index.ntotal)
        memories.clear_memory([0])
        counts.append(memories[0].knns[0].index.ntotal)
    return counts


clearing = entries(clear_memories_on_sos_token_id=START, clear_memories_on_eos_token_id=END)
plain = entries()
print(
    "entries after a text of 8 that ends with the token, and after a second one: {} {}; ".format(*clearing)
    + "without the options {} {};\n".format(*plain)
    + f"after clear_memory {clearing[2]}"
)
assert clearing == plain == [8, 16, 0], (clearing, plain)
PYTHON
