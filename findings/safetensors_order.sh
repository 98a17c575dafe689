#!/bin/sh
# safetensors 0.8.0, numpy 2.3.5: a dict of tensors is loaded in another order, which depends on dtypes.
#
# The file sorts tensors by the size of their dtype, then by name, and load_file returns them in this order; keys()
# of safe_open sorts by name alone. Neither is the order in which they were saved. What is matched by position, such
# as parameters of an optimizer or layers "2" and "10", is then matched wrongly, and a file whose last tensor
# changes from float32 to float16 loads in another order.
# Guess: a dict keeps its order, as with torch.load or np.savez.
# Output seen: saved b a 10 2, load_file a 10 2 b, keys() 10 2 a b; np.savez b a 10 2
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile safetensors==0.8.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

tensors = {
    "b": np.zeros(1, np.float16),
    "a": np.zeros(1, np.int64),
    "10": np.zeros(1, np.float32),
    "2": np.zeros(1, np.float32),
}
save_file(tensors, "tensors.safetensors")
np.savez("tensors.npz", **tensors)
loaded = " ".join(load_file("tensors.safetensors"))
with safe_open("tensors.safetensors", "np") as file:
    keys = " ".join(file.keys())
archived = " ".join(np.load("tensors.npz"))
print(f"saved {' '.join(tensors)}, load_file {loaded}, keys() {keys}; np.savez {archived}")
assert loaded == "a 10 2 b", loaded
assert keys == "10 2 a b", keys
assert archived == "b a 10 2", archived
PYTHON
