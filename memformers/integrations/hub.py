"""Models of this package on Hugging Face's hub. To load one, pass its name there to ``from_pretrained``.

The files are our own, not those of ``PyTorchModelHubMixin``, which loads a checkpoint that lacks weights
without a word.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jinja2 import Template

from memformers import __version__
from memformers.common.errors import UserError, one_line
from memformers.common.files import read_json, write_manifest, write_text
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import TOKENIZER, save_tokenizer
from memformers.models.config import ModelConfig, applies_to
from memformers.models.hub import HUB_MODEL, import_hub
from memformers.models.io import CONFIG, WEIGHTS, Pretrained
from memformers.models.rules import BUILT_IN
from memformers.runs.folder import FACTS, RESULT
from memformers.runs.load import load_checkpoint

MODEL_CARD = "README.md"
MODEL_CARD_TEMPLATE = Path(__file__).parent / "model_card.md.j2"
REPOSITORY = "https://github.com/memformers/memformers"
MEASURES = {
    "loss": "loss on the held-out text, nats per token",
    "bits_per_character": "bits per character",
    "perplexity": "perplexity per token",
    "word_perplexity": "perplexity per word",
    "accuracy": "accuracy of the next token",
    "evaluated_tokens": "evaluated tokens",
}
"""What a model card shows of ``result.json``, and how it names that."""
SETTINGS = ("n_layers", "d_model", "n_heads", "segment_len", "mem_len", "c_mem_len", "compression_rate")
"""What it shows of a model's config, where the model uses it."""


def push_to_hub(
    model: Pretrained | str | Path,
    repo_id: str,
    tokenizer: Tokenizer | None = None,
    *,
    metrics: Mapping[str, Any] | None = None,
    private: bool | None = None,
    revision: str = "",
    message: str = "Upload model",
) -> str:
    """Upload a model to Hugging Face's hub as ``repo_id``, OWNER/NAME, which is made if it doesn't exist.
    Log in before, with ``hf auth login``.

    Args:
        model: A MemoryLM or MemoryCore, or the folder of a run, which has its tokenizer and metrics.
        repo_id: Its name on the hub.
        tokenizer: What turns text into its tokens; needed to generate by the name on the hub.
        metrics: Names and values for the model card, such as a run's ``result.json``.
        private: Whether a new repository is private; by default, as your account sets it.
        revision: The branch; by default ``main``.
        message: The commit's message.

    Returns:
        The address of the commit.

    Raises:
        ValueError: For a name, run or tokenizer that can't be used, and for whatever the hub refuses.
    """
    if not HUB_MODEL.fullmatch(repo_id):
        raise UserError(f"expected a name on the hub, as OWNER/NAME, got {repo_id!r}.")
    api = import_hub().HfApi(library_name="memformers", library_version=__version__)
    with TemporaryDirectory(prefix="memformers-") as folder:
        save_for_hub(model, folder, repo_id, tokenizer, metrics=metrics)
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            # An owner's changes to the model card stay.
            has_card = api.file_exists(repo_id, MODEL_CARD, revision=revision or None)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision or None,
                ignore_patterns=[MODEL_CARD] if has_card else None,
                commit_message=message,
            )
        except Exception as error:  # of the network, of the hub or of huggingface_hub
            problem = f"{repo_id} can't be uploaded: {one_line(error)}"
            raise UserError(f"{problem} Correct the name, or run `hf auth login`.") from None
    return str(commit.commit_url)


def save_for_hub(
    model: Pretrained | str | Path,
    folder: str | Path,
    repo_id: str,
    tokenizer: Tokenizer | None = None,
    *,
    metrics: Mapping[str, Any] | None = None,
) -> None:
    """Write what [`push_to_hub`][] uploads into ``folder``: ``config.json``, ``model.safetensors``,
    ``tokenizer.json``, ``manifest.json`` with their checksums, and a model card, ``README.md``."""
    text_name = ""
    if not isinstance(model, Pretrained):
        run = Path(model)
        model, run_tokenizer = load_checkpoint(run, torch.device("cpu"))
        tokenizer = tokenizer or run_tokenizer
        if metrics is None and (run / RESULT).exists():
            metrics = read_json(run / RESULT)
        if (run / FACTS).exists():
            text_name = read_json(run / FACTS, {"corpus": dict[str, Any]})["corpus"].get("name", "")

    folder = Path(folder)
    model.save_pretrained(folder)
    files = [CONFIG, WEIGHTS]
    if tokenizer:
        check_tokenizer(model, tokenizer)
        save_tokenizer(tokenizer, folder)
        files.append(TOKENIZER)
    write_manifest(folder, files)
    write_text(folder / MODEL_CARD, model_card(model, repo_id, tokenizer, metrics or {}, text_name))


def check_tokenizer(model: Pretrained, tokenizer: Tokenizer) -> None:
    if not isinstance(model.config, ModelConfig):
        raise UserError(f"a {type(model).__name__} reads features, not text; leave the tokenizer out.")
    if model.config.vocab_size != tokenizer.vocab_size:
        sizes = f"a model of {model.config.vocab_size} tokens and a tokenizer of {tokenizer.vocab_size}"
        raise UserError(f"got {sizes}; pass the tokenizer that the model was trained with.")


def model_card(
    model: Pretrained,
    repo_id: str,
    tokenizer: Tokenizer | None,
    metrics: Mapping[str, Any],
    text_name: str,
) -> str:
    """The page that the hub shows, in Markdown, after its metadata."""
    memory = model.config.model
    settings: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    for name in SETTINGS:
        if applies_to(name, memory):
            settings[name] = getattr(model.config, name)
    if tokenizer:
        settings["tokenizer"] = f"{tokenizer.name}, {tokenizer.vocab_size:,} tokens"
    template = Template(MODEL_CARD_TEMPLATE.read_text(encoding="utf-8"), trim_blocks=True, autoescape=False)
    return template.render(
        name=repo_id,
        class_name=type(model).__name__,
        memory=memory,
        is_custom=memory not in BUILT_IN,
        is_text=isinstance(model.config, ModelConfig),
        has_tokenizer=tokenizer is not None,
        text_name=text_name,
        metrics=shown_metrics(metrics),
        settings={name: shown(value) for name, value in settings.items()},
        repository=REPOSITORY,
        version=__version__,
    )


def shown_metrics(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Those of a run that a reader compares, under names with units; or all numbers and texts."""
    if "evaluated_tokens" in metrics:  # result.json
        metrics = {unit: metrics.get(name) for name, unit in MEASURES.items()}
    values = {name: value for name, value in metrics.items() if isinstance(value, int | float | str)}
    return {name: shown(value) for name, value in values.items()}


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
