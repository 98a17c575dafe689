"""Models on Hugging Face's hub: their names there, and copies of their files here."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError, one_line

HUB_MODEL = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def is_hub_model(name: str) -> bool:
    """Whether ``name`` is OWNER/NAME on the hub. A folder called OWNER makes it a path."""
    return HUB_MODEL.fullmatch(name) is not None and not Path(name).parent.exists()


def import_hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise UserError("models on the hub need huggingface_hub: pip install huggingface_hub.") from None
    return huggingface_hub


def download(name: str, files: Sequence[str], revision: str = "") -> Path:
    """The folder in the hub's cache with those of ``files`` that the model ``name`` has at ``revision``, all
    of one commit; UserError if there is no such model, or no network and no earlier copy."""
    api = import_hub().HfApi(library_name="memformers")
    try:
        folder = api.snapshot_download(name, revision=revision or None, allow_patterns=list(files))
    except Exception as error:  # of the network, of the hub or of huggingface_hub
        problem = f"there is no folder {name}, and the hub's model can't be downloaded: {one_line(error)}"
        hint = "correct the name, or run `hf auth login` for a private model"
        raise UserError(f"{problem} To fix it, {hint}.") from None
    return Path(folder)
