"""A model that PyTorch exports to ONNX, as docs/how-to/import.md shows it, computed by the package onnx."""

import warnings

import pytest
import torch

pytest.importorskip("onnx", reason="onnx is missing; make test-integrations installs it")
pytest.importorskip("onnxscript", reason="onnxscript is missing; make test-integrations installs it")

from onnx.reference import ReferenceEvaluator

from memformers import Memory
from tests.builders import small_lm
from tests.texts import kept


@pytest.mark.parametrize("model", ["transformer-xl", "compressive", "selective"])
def test_an_exported_model_reads_segments_like_the_model(model, tmp_path):
    """A text of few letters: the selective memory holds many copies of each, and chooses the same ones."""
    lm = small_lm(model, kernel="naive", segment_len=6, c_mem_len=4).eval()
    text = torch.randint(3, (36, 2))
    memory = Memory.empty(lm.config, batch=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter itself
        program = torch.onnx.export(lm, (text[:6], memory), dynamo=True, verbose=False)
    program.save(tmp_path / "model.onnx")
    exported = ReferenceEvaluator(str(tmp_path / "model.onnx"))
    state = [*kept(memory), memory.n_valid]
    for part in text.split(6):
        with torch.no_grad():
            wanted = lm(part, memory)
        memory = wanted.memory
        named = zip(exported.input_names, [part, *state], strict=True)
        numbers = {name: x.numpy() for name, x in named}
        logits, *state, _ = map(torch.as_tensor, exported.run(None, numbers))
        torch.testing.assert_close(logits, wanted.logits)
        torch.testing.assert_close(state, [*kept(memory), memory.n_valid])
