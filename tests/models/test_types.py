"""Type checkers see the arguments and the result of a call, which PyTorch types as Any."""

from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]
# An ``ignore`` that isn't needed is an error, too.
CALLS = """
from torch import Tensor
from typing_extensions import assert_type

from memformers import CoreConfig, CoreOutput, LMOutput, Memory, MemoryCore, MemoryLM, ModelConfig
from memformers.models.language_model import LMScores


def call(lm: MemoryLM, core: MemoryCore, tokens: Tensor, targets: Tensor | None) -> None:
    assert_type(lm(tokens), LMOutput)
    assert_type(lm(tokens, None, tokens), LMScores)
    assert_type(lm(tokens, targets=tokens), LMScores)
    assert_type(lm(tokens, targets=targets), LMOutput | LMScores)
    assert_type(core(tokens, through_memory=True), CoreOutput)
    assert_type(core(tokens).memory, Memory)
    assert_type(core(tokens, return_loss=False), tuple[Tensor, Memory])
    assert_type(MemoryCore(4, 64, n_layers=2), MemoryCore)
    assert_type(MemoryCore(d_input=4), MemoryCore)
    assert_type(MemoryCore(CoreConfig(d_input=4)), MemoryCore)
    lm(tokens, mask=tokens)  # type: ignore[call-overload]
    core("features")  # type: ignore[call-overload]
"""


@pytest.mark.long  # half a minute where mypy has no cache
def test_calls_have_the_types_of_forward(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "calls.py"
    path.write_text(CALLS)
    report, problems, code = api.run(["--config-file", "pyproject.toml", str(path)])
    assert code == 0, report + problems
