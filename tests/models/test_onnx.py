"""ONNX takes whole models, with their memory as input and output, where its exporter is installed."""

import warnings

import pytest
import torch

from memformers.models.memory import Memory, memory_tensors
from tests.builders import small_lm

for package in ("onnx", "onnxscript"):
    pytest.importorskip(package)
onnxruntime = pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_an_onnx_model_reads_segment_after_segment_as_the_model_does(model, tmp_path):
    """Also where a stream is reset, by its ``valid``."""
    lm = small_lm(model, segment_len=6, n_layers=1, kernel="naive").eval()
    memory = Memory.empty(lm.config, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(
            lm,
            (torch.zeros(6, 2, dtype=torch.long), memory),
            tmp_path / "model.onnx",
            dynamo=True,
            verbose=False,
        )
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    names = [found.name for found in session.get_inputs()]
    got = list(memory_tensors(memory).values())
    for number in range(10):
        text = torch.randint(11, (6, 2))
        if number == 6:
            memory = memory.reset(torch.tensor([True, False]))
            got[-1][0] = 0
        output = lm(text, memory)
        memory = output.memory
        feed = {name: tensor.numpy() for name, tensor in zip(names, [text, *got], strict=True)}
        logits, *got, auxiliary_loss = map(torch.tensor, session.run(None, feed))
        torch.testing.assert_close(logits, output.logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(auxiliary_loss, output.auxiliary_loss, rtol=1e-4, atol=1e-5)
        for ours, wanted in zip(got, memory_tensors(memory).values(), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
