"""Our tokenizers as transformers' tokenizers, with the same ids and one more for padding."""

import copy
import json
from typing import Any

import transformers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from memformers.common.errors import UserError
from memformers.data.tokenizer import EOS, UNKNOWN, CharacterTokenizer, Tokenizer, WordTokenizer
from memformers.data.tokenizers import SubwordTokenizer, bytes_of_letters


class MemformerTokenizer(transformers.PreTrainedTokenizerFast):
    """A tokenizer of transformers' whose token ``outside``, for padding, is outside of a model's vocabulary:
    its name in a text is read as text, all other special tokens as such. It is read as a token only after you
    use it as another special token, too, such as ``eos_token``."""

    # transformers reads a whole tokenizer.json only for classes that don't define __init__.
    @property
    def outside(self) -> str | None:
        """The name of the token, as passed to the constructor and saved."""
        name: str | None = self.init_kwargs.get("outside")
        return name

    def _encode_plus(
        self,
        text: Any,
        text_pair: Any = None,
        *args: Any,
        split_special_tokens: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """What every method that reads a text calls. With ``split_special_tokens``, the names of special
        tokens are read as text."""
        if split_special_tokens is None:
            split_special_tokens = self.split_special_tokens
        reader = self
        # tokenizers reads special tokens all or not at all, so the one for padding needs a separate reader.
        if not split_special_tokens and self._is_for_padding() and contains((text, text_pair), self.outside):
            reader = self._with_one_special_token(self.outside)
            split_special_tokens = True
        options = kwargs | {"split_special_tokens": split_special_tokens}
        return super(MemformerTokenizer, reader)._encode_plus(text, text_pair, *args, **options)

    def _is_for_padding(self) -> bool:
        """Whether there is a token outside of the vocabulary, and for padding alone."""
        roles = [role for role, token in self.special_tokens_map.items() if token == self.outside]
        return self.outside is not None and set(roles) <= {"pad_token"}

    def _with_one_special_token(self, name: str | None) -> "MemformerTokenizer":
        """A copy with the same tokens, none special but the one called ``name``."""
        data = json.loads(self._tokenizer.to_str())
        for token in data["added_tokens"]:
            token["special"] = token["content"] == name
        reader = copy.copy(self)
        reader._tokenizer = Inner.from_str(json.dumps(data))
        return reader


def contains(text: Any, name: str | None) -> bool:
    """Whether a text, or any text in nested lists, contains ``name``."""
    if isinstance(text, str):
        return name is not None and name in text
    return isinstance(text, list | tuple) and any(contains(part, name) for part in text)


def tokenizer_of(tokenizer: Tokenizer) -> MemformerTokenizer:
    """A tokenizer for transformers with the same ids, which pads on the left with one more, ``<pad>``. Raises
    ValueError for tokens that are not text, and for a tokenizer that leaves out ids."""
    inner = inner_of(tokenizer)
    padding = "<pad>"
    while inner.token_to_id(padding) is not None:  # a token of the vocabulary, which is no padding here
        padding = f"<{padding}>"
    theirs = MemformerTokenizer(
        tokenizer_object=inner,
        pad_token=padding,
        outside=padding,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )
    if theirs.pad_token_id != tokenizer.vocab_size:
        raise UserError(
            f"expected tokens for all ids below {tokenizer.vocab_size}, got fewer, so that transformers "
            f"would pad with {theirs.pad_token_id}; add the missing tokens to the tokenizer."
        )
    return theirs


def inner_of(tokenizer: Tokenizer) -> Inner:
    """The ``tokenizers.Tokenizer`` with the ids of ``tokenizer``."""
    if isinstance(tokenizer, SubwordTokenizer):
        data = json.loads(tokenizer.inner.to_str())
        if tokenizer.inner.num_special_tokens_to_add(False):
            data["post_processor"] = None  # our models read a text without tokens around it
        return Inner.from_str(json.dumps(data))
    if isinstance(tokenizer, CharacterTokenizer):
        return inner_of_characters(tokenizer)
    if isinstance(tokenizer, WordTokenizer):
        return inner_of_words(tokenizer)
    if tokenizer.name == "byte":
        return inner_of_bytes()
    raise UserError(f"{tokenizer.name} tokens are not text, so transformers has no tokenizer for them.")


def inner_of_bytes() -> Inner:
    # Letters stand for bytes, as in GPT-2. Without merges, each byte is a token.
    inner = Inner(models.BPE(bytes_of_letters(), []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def inner_of_characters(tokenizer: CharacterTokenizer) -> Inner:
    inner = Inner(word_level(tokenizer))
    # Each character, line breaks too, is a word.
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return inner


def inner_of_words(tokenizer: WordTokenizer) -> Inner:
    inner = Inner(word_level(tokenizer))
    # Each line ends with its token.
    inner.normalizer = normalizers.Replace(Regex("\r\n|\r|\n"), f" {EOS} ")
    # Python's str.split also cuts at four control characters that Unicode doesn't call white space.
    separators = pre_tokenizers.Split(Regex("[\x1c-\x1f]+"), "removed")
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), separators])
    inner.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="\0", cleanup=False),  # a space before each word but the first
            decoders.Replace(Regex(rf"\A ?{EOS}\z"), "\n"),  # of a token alone, not within a word
            decoders.Fuse(),
            decoders.Replace("\n ", "\n"),
        ]
    )
    return inner


def word_level(tokenizer: CharacterTokenizer | WordTokenizer) -> models.WordLevel:
    numbers = dict(zip(tokenizer.vocabulary, range(tokenizer.vocab_size), strict=True))
    return models.WordLevel(numbers, unk_token=UNKNOWN)
