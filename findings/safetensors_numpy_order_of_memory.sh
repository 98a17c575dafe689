#!/bin/sh
# safetensors 0.8.0, numpy 2.3.5: a transposed array is saved in the order of its memory, and loads with other values.
#
# safetensors.numpy writes an array's bytes as they lie in memory, with the array's shape, and doesn't look at its
# strides. A transpose, the first columns of a matrix or an array in Fortran's order (from scikit-learn, say) loads
# with its values in other places, without an error. Converted weights are often transposes.
# np.ascontiguousarray before saving helps; safetensors.torch refuses such tensors, and np.save takes them. A
# regression from 0.7.0, reported (github.com/safetensors/safetensors/issues/825); save's docstring asks for contiguous
# tensors.
# Guess: the values are saved, whatever the strides, or an error says that they can't be.
# Output seen: transpose 0 2 4 1 3 5 loads as 0 1 2 3 4 5, with ascontiguousarray as 0 2 4 1 3 5, np.save 0 2 4 1 3 5
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile safetensors==0.8.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
from safetensors.numpy import load_file, save_file

matrix = np.arange(6.0).reshape(3, 2)


def text(array):
    return " ".join(str(int(value)) for value in array.flatten())


weight = matrix.T
save_file({"weight": weight}, "transpose.safetensors")
save_file({"weight": np.ascontiguousarray(weight)}, "copy.safetensors")
np.save("weight.npy", weight)
loaded = load_file("transpose.safetensors")["weight"]
copied = load_file("copy.safetensors")["weight"]
plain = np.load("weight.npy")
print(
    f"transpose {text(weight)} loads as {text(loaded)}, with ascontiguousarray as {text(copied)}, "
    f"np.save {text(plain)}"
)
assert loaded.shape == weight.shape
assert text(weight) == "0 2 4 1 3 5"
assert text(loaded) == "0 1 2 3 4 5", text(loaded)
assert np.array_equal(copied, weight)
assert np.array_equal(plain, weight)
PYTHON
