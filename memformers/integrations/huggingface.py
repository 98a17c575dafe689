"""Hugging Face's transformers around a [`memformers.MemoryLM`][], with the extra ``hf``. Importing this
registers the Auto classes. Ids are batch-first here alone."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from memformers.common.files import config_from_dict
from memformers.common.text import UserError
from memformers.convert.load import load_checkpoint, load_packaged
from memformers.data.tokenizer import EOS, UNKNOWN, CharacterTokenizer, Tokenizer, WordTokenizer
from memformers.data.tokenizers import SubwordTokenizer, bytes_of_letters
from memformers.generation.incremental import Stepper
from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory

SETTINGS = tuple(field.name for field in fields(ModelConfig))


class MemformerConfig(transformers.PreTrainedConfig):
    """A [`memformers.ModelConfig`][] as transformers keeps it, each setting an attribute of the same name.
    Raises ValueError as that does, and for a name that is nearly one of its settings."""

    model_type = "memformers"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]
    attribute_map: ClassVar[dict[str, str]] = {"hidden_size": "d_model", "num_hidden_layers": "n_layers"}
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        settings = {name: kwargs.pop(name) for name in SETTINGS if name in kwargs}
        for name in kwargs:
            if near := difflib.get_close_matches(name, SETTINGS, 1, 0.8):
                raise UserError(f"{name}={kwargs[name]!r} is not a setting; did you mean {near[0]!r}?")
        for name, value in asdict(config_from_dict(ModelConfig, settings, type(self).__name__)).items():
            setattr(self, name, value)
        super().__post_init__(**kwargs)
        if self.tie_word_embeddings and self.embedding != "plain":
            raise UserError("tie_word_embeddings is for embedding='plain'; use adaptive.tie_weights instead.")


class MemformerForCausalLM(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A [`memformers.MemoryLM`][], ``model``, with the methods of transformers' models. Raises ValueError as
    that does. It reads ids of any length in segments as long as in training, from an empty memory or from
    ``cache``. Each row is read exactly as alone, whatever its padding."""

    config_class = MemformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embed"
    _is_stateful = True  # it can't go back to an earlier token, as assisted generation does
    _tied_weights_keys: ClassVar[dict[str, str]] = {"model.head.weight": "model.embed.weight"}

    def __init__(self, config: MemformerConfig):
        super().__init__(config)
        settings = {name: getattr(config, name) for name in SETTINGS}
        self.model = MemoryLM(config_from_dict(ModelConfig, settings, type(config).__name__))
        self.gradient_checkpointing = False
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """MemoryLM has drawn them."""

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in transformers, but missing and unexpected weights are a ValueError instead of a warning."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(map(str, info[problem])):
                raise UserError(f"the weights don't fit config.json: {problem} {', '.join(names[:3])}.")
        return (model, info) if output_loading_info else model

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: "Memory | Decoding | None" = None,
        labels: Tensor | None = None,
        doc_starts: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, T, vocab_size]`` and, as ``cache``, the memory after the text; with ``labels`` the
        loss, in training plus the compressions' loss. Raises ValueError for what MemoryLM refuses, and for a
        training that would leave out the compressions' loss, since it computes its own from the logits.

        Args:
            input_ids: ``[B, T]``, T of any length.
            attention_mask: ``[B, T]``, 0 for padding, which may be at both ends of a row.
            cache: What the last call returned, to continue from; None for an empty memory.
            labels: ``[B, T]``, the ids, which are shifted here, or -100 to ignore some. Padding is ignored,
                and the first id after it, which nothing predicts.
            doc_starts: Boolean ``[B, T]``, where a new document begins.
            use_cache: False returns no memory. Only rows of one length that end together have one.
            kwargs: Only the Trainer's ``num_items_in_batch``: the loss is then this batch's share of a step.
        """
        n_items = kwargs.pop("num_items_in_batch", None)
        kwargs.pop("tokenizer", None)  # generate passes on the one for stop_strings
        if unknown := [name for name, x in kwargs.items() if x is not None and x is not False]:
            raise UserError(f"{', '.join(unknown)}: this model has no such argument.")
        if isinstance(cache, Decoding):
            return CausalLMOutputWithPast(logits=cache.read(input_ids, attention_mask), cache=cache)
        self.model.transformer.recompute = self.gradient_checkpointing and self.training
        parts, order, auxiliary_losses, memory, loss = [], [], [], cache, None
        S, T = self.model.config.segment_len, input_ids.shape[1]
        for rows, tokens in group_by_padding(input_ids, attention_mask):
            starts = None if doc_starts is None else doc_starts[rows, -len(tokens) :].bool().T
            memory, segments = None if cache is None else cache.streams(rows), []
            for begin in range(0, len(tokens), S):
                at = slice(begin, begin + S)
                output = self.model(tokens[at], memory, None, None if starts is None else starts[at])
                memory = output.memory
                segments.append(output.logits)
                auxiliary_losses.append(output.auxiliary_loss)
            parts.append(F.pad(torch.cat(segments).transpose(0, 1), (0, 0, T - len(tokens), 0)))
            order.append(rows)
        logits = torch.cat(parts)[torch.cat(order).argsort()]
        if labels is not None:
            n_labels = (labels[:, 1:] != -100).sum()  # what the Trainer counts
            if attention_mask is not None:
                is_id = attention_mask.bool()
                labels = labels.masked_fill(~is_id | F.pad(~is_id[:, :-1], (1, 0)), -100)
            n_predicted = (labels[:, 1:] != -100).sum().clamp(min=1)
            loss = self.loss_function(logits, labels, logits.shape[-1], num_items_in_batch=n_predicted)
            if self.training:
                loss = loss + torch.stack(auxiliary_losses).mean()
            if n_items is not None:
                loss = loss * n_labels / n_items
        elif n_items is not None or (self.training and any(x.requires_grad for x in auxiliary_losses)):
            raise UserError(
                "training needs the loss that this model computes from labels, with the compressions' own; "
                "leave out label_smoothing_factor, compute_loss_func and the like."
            )
        ends_together = len(parts) == 1 and (attention_mask is None or bool(attention_mask[:, -1].all()))
        memory = memory if ends_together and use_cache is not False else None
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=memory)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, *_: Any
    ) -> None:
        """Start with the memory of ``generate(cache=memory)``, or with none; also with ``use_cache=False``,
        which would read the whole text again for each token."""
        generation_config.use_cache = True
        copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        rows = torch.arange(batch_size).repeat_interleave(copies)
        memory = model_kwargs.get("cache")
        model_kwargs["cache"] = Decoding(self.model, memory and memory.streams(rows))


class Decoding:
    """What ``generate`` keeps between tokens: a [`memformers.Stepper`][] for all rows with the same padding,
    so that each row is continued exactly as alone."""

    is_compileable = is_croppable = False
    is_linear = (True,)  # how transformers calls a cache that doesn't grow

    def __init__(self, model: MemoryLM, memory: Memory | None):
        self.model, self.memory = model, memory
        self.groups: list[tuple[Tensor, Stepper]] = []

    def read(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Read ``tokens [B, T]``, the prompts with their ``mask [B, T]`` first: logits ``[B, 1, vocab_size]``
        after the last. Raises ValueError for prompts padded on the right."""
        if not self.groups and mask is not None and not mask[:, -1].all():
            raise UserError("a text is continued at its end; pad on the left, with padding_side='left'.")
        if self.groups:  # rows that have ended get padding, which may be outside the vocabulary
            tokens = tokens.where(tokens < self.model.config.n_tokens, 0)
        logits = [stepper.read(tokens[rows].T)[-1] for rows, stepper in self.groups]
        for rows, prompts in group_by_padding(tokens, mask) if not self.groups else ():
            memory = self.memory and self.memory.streams(rows)
            self.groups.append((rows, Stepper(self.model, len(rows), memory)))
            logits.append(self.groups[-1][1].read(prompts)[-1])
        return torch.cat(logits)[torch.cat([rows for rows, _ in self.groups]).argsort(), None]

    def reorder_cache(self, chosen: Tensor) -> None:
        """Continue with the rows ``chosen [B]``, as beam search does within each prompt."""
        for i, (rows, stepper) in enumerate(self.groups):
            streams = torch.searchsorted(rows, chosen[rows])
            reordered = Stepper(self.model, len(rows), stepper.memory().streams(streams))
            if len(stepper.running):
                reordered.read(stepper.running[:, streams])
            self.groups[i] = (rows, reordered)


def group_by_padding(ids: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows ``[n]`` of ``ids [B, T]`` with the same padding on the left, and their tokens ``[T', n]``
    without it; padding on the right, which no earlier token sees, is 0. Raises ValueError for padding between
    ids and for a row of padding alone."""
    is_id = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if is_id.shape != ids.shape:
        raise UserError(f"expected attention_mask as {[*ids.shape]}, as the ids, got {[*is_id.shape]}.")
    left, right = ((x.cumsum(1) == 0).sum(1) for x in (is_id, is_id.flip(1)))
    if (left + is_id.sum(1) + right != ids.shape[1]).any():
        raise UserError("expected attention_mask with ids in every row, and zeros at its ends only.")
    for pad in left.unique().tolist():
        rows = (left == pad).nonzero()[:, 0]
        yield rows, ids.masked_fill(~is_id, 0)[rows, pad:].T


class MemoryTrainer(transformers.Trainer, transformers.TrainerCallback):
    """A Trainer that carries the memory from batch to batch: each row continues the same row of the batch
    before, as in [`rows_in_order`][]. The memory is empty at the start of an epoch, after a resume and for
    every row of an evaluation. Raises ValueError for random order, several processes and padded rows."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.args.train_sampling_strategy != "sequential":
            raise UserError("memory is carried in order; use train_sampling_strategy='sequential'.")
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            raise UserError("memory is carried in one process; use memformers train for several.")
        self.memory: Memory | None = None
        self.add_callback(self)

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.memory = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, **options)
        memory = self.memory and self.memory.streams(slice(len(inputs["input_ids"])))  # the last has fewer
        inputs = {**inputs, "cache": memory, "use_cache": True}
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        self.memory = outputs.cache
        if self.memory is None:
            raise UserError("memory is carried only between rows of one length; use rows without padding.")
        return (loss, outputs) if return_outputs else loss


def rows_in_order(ids: Tensor | Sequence[int], batch_size: int, length: int) -> list[dict[str, Tensor]]:
    """A text ``ids [n]`` as rows ``[length]`` for a ``Trainer``, in batches of ``batch_size``: row b of a
    batch continues in row b of the next. Raises ValueError for a text that is too short."""
    per_stream = len(ids) // batch_size // length * length
    if not per_stream:
        raise UserError(f"expected at least {batch_size * length} ids for a batch, got {len(ids)}.")
    streams = torch.as_tensor(ids[: batch_size * per_stream]).view(batch_size, per_stream)
    return [{"input_ids": row, "labels": row} for batch in streams.split(length, dim=1) for row in batch]


def load(folder: str | Path) -> tuple[MemformerForCausalLM, transformers.PreTrainedTokenizerFast]:
    """Model, in eval mode, and tokenizer for transformers, of a run, a checkpoint, the folder of
    ``save_pretrained`` or a model of the package. Raises ValueError for a folder that holds none, and for
    tokens that are not text."""
    path, cpu = Path(folder), torch.device("cpu")
    lm, tokenizer = load_checkpoint(path, cpu) if path.exists() else load_packaged(str(folder), cpu)
    tied = getattr(lm.head, "weight", None) is getattr(lm.embed, "weight", ())
    model = MemformerForCausalLM(MemformerConfig(**asdict(lm.config), tie_word_embeddings=tied))
    model.model = lm
    return model.eval(), tokenizer_of(tokenizer)


def tokenizer_of(tokenizer: Tokenizer) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer for transformers with the same ids, which pads on the left with one more, ``<pad>``. Raises
    ValueError for tokens that are not text."""
    if isinstance(tokenizer, SubwordTokenizer):
        inner = tokenizer.inner
    elif tokenizer.name == "byte":
        inner = Inner(models.BPE(bytes_of_letters(), []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
    elif isinstance(tokenizer, CharacterTokenizer | WordTokenizer):
        vocabulary = {token: i for i, token in enumerate(tokenizer.vocabulary)}
        inner = Inner(models.WordLevel(vocabulary, unk_token=UNKNOWN))
        if isinstance(tokenizer, WordTokenizer):
            inner.normalizer = normalizers.Replace(Regex("\r\n|\r|\n"), f" {EOS} ")
            inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            spaces = decoders.WordPiece(prefix="\0", cleanup=False), decoders.Fuse()
            inner.decoder = decoders.Sequence([*spaces, decoders.Replace(Regex(f" ?{EOS} ?"), "\n")])
        else:
            inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            inner.decoder = decoders.Fuse()
    else:
        raise UserError(f"{tokenizer.name} tokens are not text, so transformers has no tokenizer for them.")
    names = ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", padding_side="left", model_input_names=names
    )


transformers.AutoConfig.register(MemformerConfig.model_type, MemformerConfig)
transformers.AutoModelForCausalLM.register(MemformerConfig, MemformerForCausalLM)
