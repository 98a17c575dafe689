"""Hugging Face's transformers around a [`memformers.MemoryLM`][], with the extra ``hf``. Importing this
registers the Auto classes. Ids are batch-first here alone."""

try:
    import transformers
except ImportError as error:
    raise ImportError(f"{error}; install it: pip install '.[hf]' in a clone of the repository") from None

import difflib
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from memformers.common.errors import UserError
from memformers.common.files import config_from_dict
from memformers.integrations.huggingface_cache import MemoryCache as MemoryCache
from memformers.integrations.huggingface_cache import memory_in, write_memory
from memformers.integrations.huggingface_decoding import Decoding, group_by_padding
from memformers.integrations.huggingface_tokenizer import MemformerTokenizer, tokenizer_of
from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM, build_embedding, build_head, init_vocabulary
from memformers.models.memory import Memory
from memformers.models.memory_checks import check_memory
from memformers.runs.load import load_checkpoint, load_pretrained

SETTINGS = tuple(field.name for field in fields(ModelConfig))
SIMILAR = 0.8
"""How similar an unknown name and a setting's are, from 0 to 1, if it may be a slip."""


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
        # transformers accepts any other name, and would keep a misspelled setting.
        for name in kwargs:
            matches = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=SIMILAR)
            if matches:
                raise UserError(f"{name}={kwargs[name]!r} is not a setting; did you mean {matches[0]!r}?")
        config = config_from_dict(ModelConfig, settings, type(self).__name__)
        for name, value in asdict(config).items():
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
            names = sorted(map(str, info[problem]))
            if names:
                raise UserError(f"the weights don't fit config.json: {problem} {', '.join(names[:3])}.")
        return (model, info) if output_loading_info else model

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.model.head = new_embeddings

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Module:
        """As in transformers: the embedding, the head and the vocabulary get ``new_num_tokens``, at the end.
        With ``mean_resizing=False``, the new weights are drawn as those of a new model. Raises ValueError for
        an adaptive vocabulary, for replaced layers and for fewer than one token."""
        embed = self.model.embed
        head = self.model.head
        if not is_plain(embed, nn.Embedding) or not is_plain(head, nn.Linear):
            kinds = f"{type(embed).__name__} and {type(head).__name__}"
            raise UserError(
                f"expected a plain nn.Embedding and nn.Linear to resize, got {kinds}; resize before they are "
                f"changed, and use embedding='plain' for a vocabulary that grows."
            )
        if new_num_tokens is not None and new_num_tokens < 1:
            raise UserError(f"expected new_num_tokens of at least 1, got {new_num_tokens}.")
        old_size = self.model.vocab_size
        resized = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        size = len(resized.weight)
        self.model.config = replace(self.model.config, vocab_size=size)
        self.model.vocab_size = size
        if not mean_resizing:
            self._draw_tokens(old_size)
        return resized

    @torch.no_grad()
    def _draw_tokens(self, first: int) -> None:
        """Draw the weights of the tokens from ``first`` on as a new model does."""
        embed = build_embedding(self.model.config)
        head = build_head(self.model.config)
        init_vocabulary(embed, head)
        # The embedding comes last, since a tied head has its weights.
        for module, drawn in ((self.model.head, head), (self.model.embed, embed)):
            for name, weight in module.named_parameters():
                weight[first:] = drawn.get_parameter(name)[first:].to(weight)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: "Memory | transformers.Cache | Decoding | None" = None,
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
            cache: What the last call returned, to continue from; None for an empty memory. A
                [`MemoryCache`][] is updated and returned, as transformers' caches are. With what ``generate``
                returned, there are only the logits ``[B, 1, vocab_size]`` after the last id.
            labels: ``[B, T]``, the ids, which are shifted here, or -100 to ignore some. Padding is ignored,
                and the first id after it, which nothing predicts.
            doc_starts: Boolean ``[B, T]``, where a new document begins.
            use_cache: False returns no memory. Only rows of one length that end together have one.
            kwargs: The Trainer's ``num_items_in_batch``: the loss is then this batch's share of a step. And
                ``past_key_values``, as transformers called ``cache`` before 5.24.
        """
        n_items = kwargs.pop("num_items_in_batch", None)
        kwargs.pop("tokenizer", None)  # generate passes on the one for stop_strings
        old_cache = kwargs.pop("past_key_values", None)
        if cache is not None and old_cache is not None:
            raise UserError("past_key_values is another name of cache; pass one of them.")
        cache = old_cache if cache is None else cache
        unknown = [name for name, x in kwargs.items() if x is not None and x is not False]
        if unknown:
            raise UserError(f"{', '.join(unknown)}: this model has no such argument.")

        # Within generate: the Steppers of its cache read.
        if isinstance(cache, Decoding):
            if labels is not None or doc_starts is not None:
                raise UserError(
                    "generate and its cache read each row as one document, without a loss; leave out labels "
                    "and doc_starts, or pass a memory as cache."
                )
            return CausalLMOutputWithPast(logits=cache.read(input_ids, attention_mask), cache=cache)

        # Read the rows with the same padding together, each group from its part of the memory.
        self.model.transformer.activation_checkpointing = self.gradient_checkpointing and self.training
        past_memory = self._memory_in(cache) if isinstance(cache, transformers.Cache) else cache
        memory = None if past_memory is None else self._checked(past_memory, len(input_ids))
        T = input_ids.shape[1]
        groups = []
        logits_by_group = []
        by_both_ends = self.training and self._may_learn_from_padding()
        for rows, n_left, tokens in group_by_padding(input_ids, attention_mask, by_both_ends=by_both_ends):
            end = n_left + len(tokens)
            starts = None if doc_starts is None else doc_starts[rows, n_left:end].bool().T  # [T', n]
            past = None if memory is None else memory.streams(rows)
            group = self._read_rows(rows, tokens, past, starts)
            groups.append(group)
            logits_by_group.append(F.pad(group.logits, (0, 0, n_left, T - end)))  # [n, T, vocab_size]
        order = torch.cat([group.rows for group in groups]).argsort()
        logits = torch.cat(logits_by_group)[order]  # [B, T, vocab_size]

        # The loss. A Trainer that computes its own from the logits would leave out the compressions'.
        loss = None
        if labels is not None:
            predicted = predicted_labels(labels, attention_mask)
            loss = self._loss(logits, predicted, groups)
            if n_items is not None:
                loss = loss * count_items(labels, predicted, n_items) / n_items
        elif n_items is not None or self._has_auxiliary_gradient(groups):
            raise UserError(
                "training needs the loss that this model computes from labels, with the compressions' own; "
                "leave out label_smoothing_factor, compute_loss_func and the like."
            )

        # A memory is for rows that end together: only then can the next ids follow all of them.
        ends_together = len(groups) == 1 and (attention_mask is None or bool(attention_mask[:, -1].all()))
        next_memory = groups[0].memory if ends_together and use_cache is not False else None
        if not isinstance(cache, transformers.Cache):
            return CausalLMOutputWithPast(loss=loss, logits=logits, cache=next_memory)

        # A Cache is changed, and must not stay behind what was read.
        if next_memory is not None:
            write_memory(cache, next_memory, T)
        elif use_cache is not False:
            raise UserError(
                "a cache is only for rows that end together; use padding of one length, or no cache."
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)

    def _has_auxiliary_gradient(self, groups: list["RowsOutput"]) -> bool:
        return self.training and any(group.auxiliary_loss.requires_grad for group in groups)

    def _may_learn_from_padding(self) -> bool:
        """Whether the model may have a separate loss for all positions, those of padding included."""
        config = self.model.config
        without_loss = config.model in ("transformer", "transformer-xl", "selective")
        return not without_loss and config.compression_loss != "none"

    def _read_rows(
        self, rows: Tensor, tokens: Tensor, memory: Memory | None, starts: Tensor | None
    ) -> "RowsOutput":
        """Read ``tokens [T, n]`` of the ``rows [n]`` after ``memory``, in segments."""
        S = self.model.config.segment_len
        logits = []
        auxiliary_losses = []
        for begin in range(0, len(tokens), S):
            segment = slice(begin, begin + S)
            segment_starts = None if starts is None else starts[segment]
            output = self.model(tokens[segment], memory, None, segment_starts)
            memory = output.memory
            logits.append(output.logits)  # [S, n, vocab_size]
            auxiliary_losses.append(output.auxiliary_loss)
        auxiliary_loss = torch.stack(auxiliary_losses).mean()
        return RowsOutput(rows, torch.cat(logits).transpose(0, 1), memory, auxiliary_loss)

    def _loss(self, logits: Tensor, labels: Tensor, groups: list["RowsOutput"]) -> Tensor:
        """The mean over what is predicted of ``labels [B, T]`` by ``logits [B, T, vocab_size]``. In training,
        the compressions' loss of each of ``groups`` has the weight of its predictions."""
        n_by_row = (labels[:, 1:] != -100).sum(1)  # [B]
        n_predicted = n_by_row.sum().clamp(min=1)
        loss = self.loss_function(logits, labels, logits.shape[-1], num_items_in_batch=n_predicted)
        if self.training:
            weighted = []
            for group in groups:
                share = n_by_row[group.rows].sum() / n_predicted
                weighted.append(group.auxiliary_loss * share)
            loss = loss + torch.stack(weighted).sum()
        return loss

    def _memory_in(self, cache: transformers.Cache) -> Memory | None:
        return memory_in(cache, self.model.config.n_layers, self.model.device)

    def _checked(self, memory: Memory | None, batch: int) -> Memory:
        """The ``memory``; ValueError unless this model made it of a ``batch`` of rows."""
        transformer = self.model.transformer
        return check_memory(memory, transformer.weight.expand(1, batch, -1), transformer.sizes)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, *_: Any
    ) -> None:
        """Start with the memory of ``generate(cache=memory)``, with what another ``generate`` returned, or
        with nothing."""
        # Without a cache, the whole text would be read again for each token.
        generation_config.use_cache = True
        # Prompts of any length are read in segments, so chunks have no use.
        generation_config.prefill_chunk_size = None
        n_copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        cache = model_kwargs.get("cache")
        # What another generate returned: its Steppers continue.
        if isinstance(cache, Decoding):
            if cache.model is not self.model:
                raise UserError("this cache is of another model; use it with the model that made it.")
            model_kwargs["cache"] = cache.resume(batch_size, n_copies)
            return
        # A Cache has all ids in transformers, and a memory only those that follow: they must not be confused.
        if isinstance(cache, transformers.Cache):
            cache = self._memory_in(cache)
            if cache is not None:
                raise UserError(
                    "generate writes from an empty cache, from a Memory with the ids that follow it, or from "
                    "what another generate returned; this cache has read a text. Pass what the model returns "
                    "without a Cache."
                )
        # A memory, whose rows are copied as transformers copies the prompts; or nothing.
        memory = None
        if cache is not None:
            rows = torch.arange(batch_size, device=self.model.device).repeat_interleave(n_copies)
            memory = self._checked(cache, batch_size).streams(rows)
        model_kwargs["cache"] = Decoding(self.model, memory)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a ``module`` is of this ``kind`` and its weight a parameter, not computed from others."""
    return type(module) is kind and "weight" in module._parameters


class RowsOutput(NamedTuple):
    """What reading rows with the same padding returns."""

    rows: Tensor  # [n]
    logits: Tensor  # [n, T', vocab_size], without the padding on the left
    memory: Memory | None
    auxiliary_loss: Tensor  # the mean over segments


def predicted_labels(labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """``labels [B, T]`` with -100 for padding and for the first id after it, which nothing predicts. A
    Trainer that accumulates batches padded on the left needs them so, from its data collator."""
    if attention_mask is None:
        return labels
    is_id = attention_mask.bool()  # [B, T]
    follows_id = F.pad(is_id[:, :-1], (1, 0))
    return labels.masked_fill(~is_id | ~follows_id, -100)


def count_items(labels: Tensor, predicted: Tensor, n_items: Tensor | int) -> Tensor:
    """How many of the ``n_items`` labels that a Trainer counted for a step are in a batch with ``labels [B,
    T]``. Raises ValueError if it counts more than the ``predicted [B, T]`` in a step of several batches:
    their weights would be wrong."""
    n_labels = (labels[:, 1:] != -100).sum()
    n_predicted = (predicted[:, 1:] != -100).sum()
    if n_labels != n_predicted and n_labels != n_items:
        raise UserError(
            f"the Trainer weighs the batches of a step by their labels and counts {n_labels} here, but "
            f"{n_predicted} are predicted: not padding, nor the first id after it; set their labels to -100, "
            f"as huggingface.predicted_labels does, or pad on the right, with padding_side='right'."
        )
    return n_labels


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
        n_rows = len(inputs["input_ids"])
        # The last batch may have fewer rows.
        memory = None if self.memory is None else self.memory.streams(slice(n_rows))
        inputs = {**inputs, "cache": memory, "use_cache": True}
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        self.memory = outputs.cache
        if self.memory is None:
            raise UserError("memory is carried only between rows of one length; use rows without padding.")
        return (loss, outputs) if return_outputs else loss


def rows_in_order(ids: Tensor | Sequence[int], batch_size: int, length: int) -> list[dict[str, Tensor]]:
    """A text ``ids [n]`` as rows ``[length]`` for a ``Trainer``, in batches of ``batch_size``: row b of a
    batch continues in row b of the next. Raises ValueError for a text that is too short."""
    ids_per_stream = len(ids) // batch_size // length * length
    if not ids_per_stream:
        raise UserError(f"expected at least {batch_size * length} ids for a batch, got {len(ids)}.")
    streams = torch.as_tensor(ids[: batch_size * ids_per_stream]).view(batch_size, ids_per_stream)
    rows = []
    for batch in streams.split(length, dim=1):  # [batch_size, length]
        rows += [{"input_ids": row, "labels": row} for row in batch]
    return rows


def load(folder: str | Path) -> tuple[MemformerForCausalLM, MemformerTokenizer]:
    """Model, in eval mode, and tokenizer for transformers, of a run, a checkpoint, the folder of
    ``save_pretrained``, or a model of the package or the hub, as ``"OWNER/NAME"``. Raises ValueError for a
    folder that holds none, and for tokens that are not text."""
    path = Path(folder)
    cpu = torch.device("cpu")
    lm, tokenizer = load_checkpoint(path, cpu) if path.exists() else load_pretrained(str(folder), cpu)
    # An adaptive head or embedding has no single weight.
    is_tied = getattr(lm.head, "weight", None) is getattr(lm.embed, "weight", ())
    model = MemformerForCausalLM(MemformerConfig(**asdict(lm.config), tie_word_embeddings=is_tied))
    model.model = lm
    return model.eval(), tokenizer_of(tokenizer)


transformers.AutoConfig.register(MemformerConfig.model_type, MemformerConfig)
transformers.AutoModelForCausalLM.register(MemformerConfig, MemformerForCausalLM)
transformers.AutoTokenizer.register(MemformerConfig, MemformerTokenizer)
