#!/bin/sh
# onnxruntime 1.32.0, onnx 1.23.2: with IO binding, a state that is bound back is overwritten while it is still read.
#
# bind_output(name) without a buffer lets the session allocate one, in the first run. The binding keeps it: each later
# run writes into the same buffer. So the usual loop for a carried state, which binds the new state as the next
# run's old one, makes both the same memory. What the graph computes from the old state after it wrote the new
# one is wrong, from the second step on, and a state that one keeps for a branch changes. Nothing is raised.
# clear_binding_outputs() and bind_output() before each run, or run_with_ort_values(), are right.
# Guess: each run returns new outputs, as run() does, or the binding refuses an input that is an output.
# Output seen: difference of new and old state, expected 1 1 1 1: bound once 1 0 0 0, bound anew 1 1 1 1, ort_values 1 1 1 1;
# states kept 4 4 4 4, 1 2 3 4, 1 2 3 4
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile onnxruntime==1.32.0 onnx==1.23.2 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

N_STEPS = 4


def vector(name):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])


graph = helper.make_graph(
    [helper.make_node("Add", ["old", "input"], ["new"]), helper.make_node("Sub", ["new", "old"], ["difference"])],
    "step",
    inputs=[vector("old"), vector("input")],
    outputs=[vector("new"), vector("difference")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
ZERO, ONE = np.zeros(1, np.float32), np.ones(1, np.float32)


def bound(anew):
    binding = session.io_binding()
    binding.bind_cpu_input("old", ZERO)
    binding.bind_cpu_input("input", ONE)
    states, differences = [], []
    for step in range(N_STEPS):
        if step == 0 or anew:
            binding.clear_binding_outputs()
            binding.bind_output("new")
            binding.bind_output("difference")
        session.run_with_iobinding(binding)
        new, difference = binding.get_outputs()
        states.append(new)
        differences.append(difference.numpy().item())
        binding.bind_ortvalue_input("old", new)
    return differences, [state.numpy().item() for state in states]


def with_ort_values():
    old = onnxruntime.OrtValue.ortvalue_from_numpy(ZERO)
    one = onnxruntime.OrtValue.ortvalue_from_numpy(ONE)
    states, differences = [], []
    for _ in range(N_STEPS):
        old, difference = session.run_with_ort_values(None, {"old": old, "input": one})
        states.append(old)
        differences.append(difference.numpy().item())
    return differences, [state.numpy().item() for state in states]


def shown(values):
    return " ".join(f"{value:.0f}" for value in values)


once, anew, values = bound(anew=False), bound(anew=True), with_ort_values()
print(
    f"difference of new and old state, expected 1 1 1 1: bound once {shown(once[0])}, bound anew "
    f"{shown(anew[0])}, ort_values {shown(values[0])}; states kept {shown(once[1])}, {shown(anew[1])}, "
    f"{shown(values[1])}"
)
assert once == ([1, 0, 0, 0], [4, 4, 4, 4]), once
assert anew == ([1, 1, 1, 1], [1, 2, 3, 4]), anew
assert values == anew, values
PYTHON
