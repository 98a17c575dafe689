"""torch.export takes whole models, with their memory as input and output."""

import io

import pytest
import torch

from memformers.models.memory import Memory
from tests.builders import small_lm
from tests.texts import BY_LAYER


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("model", "settings", "strict"),
    [("compressive", BY_LAYER, False),
     pytest.param("compressive", BY_LAYER, True, marks=pytest.mark.long),
     pytest.param("transformer-xl", {"n_layers": 1}, False, marks=pytest.mark.long)],
)  # fmt: skip
def test_an_exported_model_reads_segment_after_segment_as_the_model_does(model, settings, strict):
    lm = small_lm(model, segment_len=6, **settings).eval()

    def segment():
        return torch.randint(11, (6, 2)), torch.rand(6, 2) < 0.1

    text, doc_starts = segment()
    memory = Memory.empty(lm.config, 2)
    file = io.BytesIO()
    program = torch.export.export(lm, (text, memory), {"doc_starts": doc_starts}, strict=strict)
    torch.export.save(program, file)
    exported = torch.export.load(io.BytesIO(file.getvalue())).module()
    wanted, got = memory, memory
    for _ in range(10):
        text, doc_starts = segment()
        of_model, of_exported = (
            lm(text, wanted, doc_starts=doc_starts),
            exported(text, got, doc_starts=doc_starts),
        )
        torch.testing.assert_close(of_exported.logits, of_model.logits, rtol=0, atol=1e-10)
        torch.testing.assert_close(of_exported.auxiliary_loss, of_model.auxiliary_loss, rtol=0, atol=1e-10)
        wanted, got = of_model.memory, of_exported.memory
        assert torch.equal(got.valid, wanted.valid)
    assert isinstance(got, Memory)
