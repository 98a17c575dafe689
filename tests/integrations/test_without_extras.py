"""The adapters where their libraries are not installed."""

import sys
from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("adapter", "library", "extra"),
    [
        ("huggingface", "transformers", "hf"),
        ("torchrl", "tensordict", "torchrl"),
        ("torchrl", "torchrl", "torchrl"),
    ],
)
def test_an_adapter_names_its_extra(adapter, library, extra, monkeypatch):
    module = f"memformers.integrations.{adapter}"
    # Where the library is installed, other tests have imported the adapter.
    for name in list(sys.modules):
        if name == module or name.startswith(f"{module}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError) as error:
        import_module(module)
    assert f"pip install '.[{extra}]'" in str(error.value)
