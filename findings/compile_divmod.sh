#!/bin/sh
# torch 2.13.0: torch.compile takes divmod of a tensor's length only as long as the length is a constant.
#
# A function with divmod(len(x), 3) compiles for the first length it is called with. With a second length, which
# Dynamo makes dynamic, the same function fails: TypeError, "unsupported operand type(s) for divmod(): 'int' and
# 'int'", although both are integers; without fullgraph the graph breaks there, silently. len(x) // 3 and
# len(x) % 3 compile for all lengths. So a model that splits segments by divmod passes a test with one length,
# and fails, or becomes slower, with the next one.
# Guess: divmod of two integers compiles like // and %.
# Output seen: first divmod ok, second divmod Unsupported, first // and % ok, second // and % ok
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import torch


def by_divmod(x):
    whole, rest = divmod(len(x), 3)
    return x + whole * rest


def by_operators(x):
    return x + (len(x) // 3) * (len(x) % 3)


def outcome(compiled, length):
    try:
        compiled(torch.zeros(length))
    except torch._dynamo.exc.Unsupported:
        return "Unsupported"
    return "ok"


assert torch.__version__.startswith("2.13.0"), torch.__version__
with_divmod = torch.compile(by_divmod, fullgraph=True, backend="eager")
with_operators = torch.compile(by_operators, fullgraph=True, backend="eager")
seen = [outcome(with_divmod, 7), outcome(with_divmod, 8), outcome(with_operators, 7), outcome(with_operators, 8)]
print("first divmod %s, second divmod %s, first // and %% %s, second // and %% %s" % tuple(seen))
assert seen == ["ok", "Unsupported", "ok", "ok"], seen
PYTHON
