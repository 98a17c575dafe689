#!/bin/sh
# torch 2.13.0: torch.compile computes the backward pass of a block with autocast disabled in bfloat16.
#
# Attention scores, losses and norms are often put into torch.autocast(enabled=False), so that nothing in them is
# rounded. Uncompiled, the gradient of such a block has the precision of its forward pass. Compiled, the forward pass
# is exact, but the backward pass is traced in the autocast state in which the compiled function was called, whatever
# the block says, so its matrix products round their operands to 8 bits. The gradient has dtype float32 all the same.
# Compiling inside of the block is right.
# Guess: a block that disables autocast is computed alike in both directions.
# Output seen: relative error of the gradient: 1e-07 uncompiled, 3e-03 compiled, 1e-07 compiled inside
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch

torch.manual_seed(0)
query = torch.randn(64, 32, requires_grad=True)
key = torch.randn(64, 32)
# The gradient of sum(scores * weights), written out.
weights = torch.randn(64, 64)
wanted = weights.double() @ key.double()


def scores(query, key):
    return query @ key.T


def exact_scores(query, key):
    with torch.autocast("cpu", enabled=False):
        return scores(query, key)


compiled_inside = torch.compile(scores, backend="aot_eager")


def scores_compiled_inside(query, key):
    with torch.autocast("cpu", enabled=False):
        return compiled_inside(query, key)


def relative_error(function):
    query.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        result = function(query, key)
    assert result.dtype == torch.float32
    assert torch.allclose(result, query @ key.T)
    (result * weights).sum().backward()
    assert query.grad.dtype == torch.float32
    return ((query.grad - wanted).norm() / wanted.norm()).item()


uncompiled = relative_error(exact_scores)
compiled = relative_error(torch.compile(exact_scores, backend="aot_eager"))
inside = relative_error(scores_compiled_inside)
print(f"relative error of the gradient: {uncompiled:.0e} uncompiled, {compiled:.0e} compiled, "
      f"{inside:.0e} compiled inside")
assert uncompiled < 1e-6
assert inside < 1e-6
assert compiled > 1e-3
PYTHON
