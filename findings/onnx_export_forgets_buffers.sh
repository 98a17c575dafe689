#!/bin/sh
# torch 2.13.0, onnx 1.23.2, onnxscript 0.7.2, onnxruntime 1.32.0: torch.onnx.export drops writes to a buffer.
#
# torch.export keeps the write: the program's module carries its buffer from call to call. The ONNX exporter, which
# starts from this program, leaves the write out and makes the buffer a constant. A model that keeps its memory in a
# buffer exports without an error or a warning, and never remembers. With verify=True a difference is logged, but the
# check itself has written to the buffer, so in the exported file every call begins with the memory of the check.
# Guess: a graph has no state that persists, so the export refuses the write, or returns the buffer as an output.
# Output seen: outputs of three calls: model 1 2 2, torch.export 1 2 2, ONNX 1 1 1, ONNX with verify=True 2 2 2
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 \
    onnxruntime==1.32.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON' 2> log || { cat log; exit 1; }
import warnings

import onnxruntime
import torch


class WithMemory(torch.nn.Module):
    """Adds the previous input, which it keeps in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.zeros(1))

    def forward(self, x):
        output = x + self.memory
        self.memory.copy_(x)
        return output


def three_calls(model):
    return [int(model(torch.ones(1)).item()) for _ in range(3)]


def calls_in_onnx(verify):
    program = torch.onnx.export(
        WithMemory(), (torch.ones(1),), dynamo=True, verify=verify, verbose=False
    )
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    assert len(session.get_inputs()) == len(session.get_outputs()) == 1
    return three_calls(lambda x: session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


eager = three_calls(WithMemory())
exported = three_calls(torch.export.export(WithMemory(), (torch.ones(1),)).module())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    unverified, verified = calls_in_onnx(verify=False), calls_in_onnx(verify=True)
about_memory = [str(warning.message) for warning in caught if "memory" in str(warning.message)]
shown = [" ".join(map(str, values)) for values in (eager, exported, unverified, verified)]
print(
    f"outputs of three calls: model {shown[0]}, torch.export {shown[1]}, ONNX {shown[2]}, "
    f"ONNX with verify=True {shown[3]}"
)
assert eager == exported == [1, 2, 2]
assert unverified == [1, 1, 1]
assert verified == [2, 2, 2]
assert about_memory == []
PYTHON
