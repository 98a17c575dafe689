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

from memformers.common.errors import UserError
from memformers.common.files import config_from_dict
from memformers.convert.load import load_checkpoint, load_packaged
from memformers.data.tokenizer import UNKNOWN, ByteTokenizer, CharacterTokenizer, Tokenizer, WordTokenizer
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
        """Set the settings among ``kwargs``, and the defaults of the others."""
        given = {name: kwargs.pop(name) for name in SETTINGS if name in kwargs}
        for name in kwargs:
            if near := difflib.get_close_matches(name, SETTINGS, 1, 0.8):
                raise UserError(f"{name}={kwargs[name]!r} is no setting; did you mean {near[0]!r}?")
        for name, value in asdict(config_from_dict(ModelConfig, given, type(self).__name__)).items():
            setattr(self, name, value)
        super().__post_init__(**kwargs)
        if self.tie_word_embeddings and self.embedding != "plain":
            raise UserError("tie_word_embeddings is for embedding='plain'; use adaptive.tie_weights instead.")


class MemformerForCausalLM(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A [`memformers.MemoryLM`][], ``model``, with the methods of transformers' models. Raises ValueError as
    that does.

    A text is read in segments as long as in training, from an empty memory or from ``cache``, so ids may be
    of any length. Each row is read exactly as alone: padding is left out on its left, and follows what is
    read on its right.
    """

    config_class = MemformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True  # it can't go back to an earlier token, as assisted generation does
    _tied_weights_keys: ClassVar[dict[str, str]] = {"model.head.weight": "model.embed.weight"}

    def __init__(self, config: MemformerConfig):
        super().__init__(config)
        settings = {name: getattr(config, name) for name in SETTINGS}
        self.model = MemoryLM(config_from_dict(ModelConfig, settings, type(config).__name__))
        self.gradient_checkpointing = False
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Keep the weights that the model has drawn."""

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As transformers' own, which only warns of weights that are missing; here they are a ValueError."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(map(str, info[what])):
                raise UserError(f"the weights don't fit config.json: {what} {', '.join(names[:3])}.")
        return (model, info) if output_loading_info else model

    def get_input_embeddings(self) -> torch.nn.Module:
        """The embedding."""
        return self.model.embed

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: "Memory | Decoding | None" = None,
        labels: Tensor | None = None,
        doc_starts: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits ``[B, T, vocab_size]`` and, as ``cache``, the memory after the text; with ``labels`` the
        loss, in training with what compressions learn from. Raises ValueError for what MemoryLM refuses.

        Args:
            input_ids: ``[B, T]``, T of any length.
            attention_mask: ``[B, T]``, 0 where there is padding, at the ends of a row.
            cache: What the last call returned, to read on; None for an empty memory.
            labels: ``[B, T]``, the ids themselves, since they are shifted here, or -100 to leave some out.
            doc_starts: Boolean ``[B, T]``, where a new document begins.
            use_cache: Whether to return the memory, which only rows have that end together and are as long.
            return_dict: False returns a tuple.
            kwargs: ``num_items_in_batch``, as the Trainer gives it, and nothing else.
        """
        n_items = kwargs.pop("num_items_in_batch", None)
        if given := [name for name, x in kwargs.items() if x is not None and x is not False]:
            raise UserError(f"this model doesn't know {', '.join(given)}; leave it out.")
        if isinstance(cache, Decoding):
            return CausalLMOutputWithPast(logits=cache.read(input_ids, attention_mask), cache=cache)
        self.model.transformer.recompute = self.gradient_checkpointing and self.training
        parts, order, losses, after, loss = [], [], [], cache, None
        S, T = self.model.config.segment_len, input_ids.shape[1]
        for rows, tokens in alike(input_ids, attention_mask):
            starts = None if doc_starts is None else doc_starts[rows, -len(tokens) :].bool().T
            after, read = None if cache is None else cache.streams(rows), []
            for begin in range(0, len(tokens), S):
                segment = slice(begin, begin + S)
                output = self.model(tokens[segment], after, None, None if starts is None else starts[segment])
                after = output.memory
                read.append(output.logits)
                losses.append(output.auxiliary_loss)
            parts.append(F.pad(torch.cat(read).transpose(0, 1), (0, 0, T - len(tokens), 0)))
            order.append(rows)
        logits = torch.cat(parts)[torch.cat(order).argsort()]
        if labels is not None:
            if attention_mask is not None:  # nothing predicts the first id after padding
                labels = labels.masked_fill(F.pad(attention_mask[:, :-1] == 0, (1, 0)), -100)
            loss = self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch=n_items)
            if self.training:  # of several batches that are one step, each has its share
                share = 1.0 if n_items is None else (labels[:, 1:] != -100).sum() / n_items
                loss = loss + share * torch.stack(losses).mean()
        is_whole = len(parts) == 1 and (attention_mask is None or bool(attention_mask[:, -1].all()))
        kept = after if is_whole and use_cache is not False else None
        result = CausalLMOutputWithPast(loss=loss, logits=logits, cache=kept)
        return result.to_tuple() if return_dict is False else result

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, *_: Any
    ) -> None:
        """Begin with the memory that ``generate(cache=memory)`` was given, or none."""
        if generation_config.use_cache is not False:
            copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            rows = torch.arange(batch_size, device=self.device).repeat_interleave(copies)
            memory = model_kwargs.get("cache")
            model_kwargs["cache"] = Decoding(self.model, memory and memory.streams(rows))


class Decoding:
    """What ``generate`` keeps between tokens: for the rows that are padded alike, a [`memformers.Stepper`][],
    so that each row is continued exactly as alone. It begins with ``memory``."""

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
        found = [stepper.read(tokens[rows].T)[-1] for rows, stepper in self.groups]
        for rows, prompts in alike(tokens, mask) if not self.groups else ():
            memory = self.memory and self.memory.streams(rows)
            self.groups.append((rows, Stepper(self.model, len(rows), memory)))
            found.append(self.groups[-1][1].read(prompts)[-1])
        return torch.cat(found)[torch.cat([rows for rows, _ in self.groups]).argsort(), None]

    def reorder_cache(self, chosen: Tensor) -> None:
        """Go on with the rows ``chosen [B]``, as beam search does; each is one of the same prompt."""
        for i, (rows, stepper) in enumerate(self.groups):
            own = torch.searchsorted(rows, chosen[rows])
            again = Stepper(self.model, len(rows), stepper.memory().streams(own))
            if len(stepper.running):
                again.read(stepper.running[:, own])
            self.groups[i] = (rows, again)


def alike(ids: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows ``[n]`` of ``ids [B, T]`` with the same padding on the left by ``mask [B, T]``, and their
    tokens ``[T', n]`` without it; padding on the right, which nothing before it sees, is 0. Raises ValueError
    for padding between ids, and for a row of nothing else."""
    here = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if here.shape != ids.shape:
        raise UserError(f"expected attention_mask as {[*ids.shape]}, as the ids, got {[*here.shape]}.")
    left, right = ((x.cumsum(1) == 0).sum(1) for x in (here, here.flip(1)))
    if (left + here.sum(1) + right != ids.shape[1]).any():
        raise UserError("expected attention_mask with ids in each row, and zeros at its ends only.")
    for pad in left.unique().tolist():
        rows = (left == pad).nonzero()[:, 0]
        yield rows, ids.masked_fill(~here, 0)[rows, pad:].T


class MemoryTrainer(transformers.Trainer, transformers.TrainerCallback):
    """A Trainer whose rows go on where those of the batch before ended, as [`rows_in_order`][] gives them: in
    training it carries the memory from batch to batch. That begins empty in each epoch and where a training
    resumes, and is left out in evaluation. A plain Trainer begins each row with an empty memory. Raises
    ValueError for random order, several processes, and rows that are padded."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.args.train_sampling_strategy != "sequential":
            raise UserError("memory is carried in order; use train_sampling_strategy='sequential'.")
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            raise UserError("memory is carried in one process; use memformers train for several.")
        self.memory: Memory | None = None
        self.add_callback(self)

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Begin with an empty memory."""
        self.memory = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **how: Any) -> Any:
        """As the Trainer's, for the batch ``inputs`` after the memory of the one before it."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, **how)
        memory = self.memory and self.memory.streams(slice(len(inputs["input_ids"])))  # the last has fewer
        given = {**inputs, "cache": memory, "use_cache": True}
        loss, outputs = super().compute_loss(model, given, return_outputs=True, **how)
        self.memory = outputs.cache
        if self.memory is None:
            raise UserError("memory goes on only after rows of one length; leave out their padding.")
        return (loss, outputs) if return_outputs else loss


def rows_in_order(ids: Tensor | Sequence[int], batch_size: int, length: int) -> list[dict[str, Tensor]]:
    """A text ``ids [n]`` as rows ``[length]`` for a ``Trainer``: batches of ``batch_size`` streams, of which
    row b goes on in row b of the next batch. Raises ValueError for too short a text."""
    per_stream = len(ids) // batch_size // length * length
    if not per_stream:
        raise UserError(f"expected at least {batch_size * length} ids for a batch, got {len(ids)}.")
    streams = torch.as_tensor(ids[: batch_size * per_stream]).view(batch_size, per_stream)
    return [{"input_ids": row, "labels": row} for batch in streams.split(length, dim=1) for row in batch]


def load(folder: str | Path) -> tuple[MemformerForCausalLM, transformers.PreTrainedTokenizerFast]:
    """Model, in eval mode, and tokenizer of a run, a checkpoint, the folder of ``save_pretrained`` or a model
    of the package, for transformers; its ``save_pretrained`` writes them for Auto classes. Raises ValueError
    for a folder that holds none, and for tokens that are no text."""
    here, cpu = Path(folder), torch.device("cpu")
    own, tokenizer = load_checkpoint(here, cpu) if here.exists() else load_packaged(str(folder), cpu)
    tied = getattr(own.head, "weight", None) is getattr(own.embed, "weight", ())
    model = MemformerForCausalLM(MemformerConfig(**asdict(own.config), tie_word_embeddings=tied))
    model.model = own
    return model.eval(), tokenizer_of(tokenizer)


def tokenizer_of(tokenizer: Tokenizer) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer as transformers has it, with the same ids and ``<pad>``, on the left, after them. Raises
    ValueError for tokens that are no text."""
    if isinstance(tokenizer, SubwordTokenizer):
        inner = tokenizer.inner
    elif isinstance(tokenizer, ByteTokenizer):
        inner = Inner(models.BPE(bytes_of_letters(), []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
    elif isinstance(tokenizer, CharacterTokenizer | WordTokenizer):
        vocabulary = {token: i for i, token in enumerate(tokenizer.vocabulary)}
        inner = Inner(models.WordLevel(vocabulary, unk_token=UNKNOWN))
        if isinstance(tokenizer, WordTokenizer):
            inner.normalizer = normalizers.Replace(Regex("\r\n|\r|\n"), " <eos> ")
            inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        else:
            inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
            inner.decoder = decoders.Fuse()
    else:
        raise UserError(f"{tokenizer.name} tokens are no text, so transformers has no tokenizer for them.")
    inputs = ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", padding_side="left", model_input_names=inputs
    )


transformers.AutoConfig.register(MemformerConfig.model_type, MemformerConfig)
transformers.AutoModelForCausalLM.register(MemformerConfig, MemformerForCausalLM)
