#!/bin/sh
# flax 0.12.8, jax 0.10.2: nnx.RNN gives a row of length 0 the carry after all of its padding.
#
# With seq_lengths, the returned carry of a row is the one at index length - 1. For a length of 0 that is -1, the
# last one: the state after the padding, instead of initial_carry. It happens where texts are read in segments
# with a carried state and one text of the batch has ended, or where an agent has no message in a turn: that row's state
# is overwritten by padding, and the others' are right. flax.linen.RNN does the same.
# Guess: a row without valid steps keeps its initial carry.
# Output seen: from a carry of 0.5, rows of lengths 2 and 0 padded to 4 with 0: the carry of the first differs by 0.00;
# of the empty row, nnx differs from 0.5 by 0.45 and from the state after the padding by 0.00, linen by 0.62 and 0.00
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile flax==0.12.8 jax==0.10.2 numpy==2.3.5
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

WIDTH = 4
LENGTHS = jnp.array([2, 0])
texts = jax.random.normal(jax.random.key(0), (2, 4, 3))
padded = jnp.where(jnp.arange(4)[None, :, None] < LENGTHS[:, None, None], texts, 0.0)
initial = jnp.full((2, WIDTH), 0.5)
of_nnx = nnx.RNN(nnx.GRUCell(3, WIDTH, rngs=nnx.Rngs(0)))
of_linen = nn.RNN(nn.GRUCell(WIDTH))
weights = of_linen.init(jax.random.key(0), padded)


def by_nnx(inputs, carry, lengths=None):
    return of_nnx(inputs, initial_carry=carry, seq_lengths=lengths, return_carry=True)[0]


def by_linen(inputs, carry, lengths=None):
    return of_linen.apply(weights, inputs, initial_carry=carry, seq_lengths=lengths, return_carry=True)[0]


def differences(read):
    carries = read(padded, initial, LENGTHS)
    first = read(padded[:1, :2], initial[:1])
    after_padding = read(padded[1:], initial[1:])
    pairs = [(carries[:1], first), (carries[1:], initial[1:]), (carries[1:], after_padding)]
    return [float(jnp.abs(a - b).max()) for a, b in pairs]


nnx_first, nnx_kept, nnx_padding = differences(by_nnx)
linen_first, linen_kept, linen_padding = differences(by_linen)
print(
    f"from a carry of 0.5, rows of lengths 2 and 0 padded to 4 with 0: the carry of the first differs by "
    f"{max(nnx_first, linen_first):.2f};\nof the empty row, nnx differs from 0.5 by {nnx_kept:.2f} and from the state "
    f"after the padding by {nnx_padding:.2f}, linen by {linen_kept:.2f} and {linen_padding:.2f}"
)
assert max(nnx_first, linen_first) < 1e-5
assert min(nnx_kept, linen_kept) > 0.1
assert max(nnx_padding, linen_padding) < 1e-5
PYTHON
