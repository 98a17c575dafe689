"""The adapters where their libraries are not installed."""

import sys

import pytest

from tests.processes import finish


@pytest.mark.parametrize(
    ("adapter", "library", "extra"),
    [
        ("huggingface", "transformers", "hf"),
        ("torchrl", "tensordict", "torchrl"),
        ("torchrl", "torchrl", "torchrl"),
    ],
)
def test_an_adapter_names_its_extra(adapter, library, extra):
    code = f"import sys; sys.modules[{library!r}] = None; import memformers.integrations.{adapter}"
    result = finish([sys.executable, "-c", code])
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith("ImportError: ")
    assert f"pip install '.[{extra}]'" in error
