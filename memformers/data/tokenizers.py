"""Tokenizers by their names and files; subwords are those of Hugging Face's library."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from memformers.common.errors import UserError
from memformers.common.files import read_json, user_path, write_json
from memformers.data.files import CONTEXT, NOT_UTF8, Ids, bytes_of, check_utf8
from memformers.data.tokenizer import (
    ByteTokenizer,
    CharacterTokenizer,
    IdTokenizer,
    Tokenizer,
    WordTokenizer,
    code_points,
    learn_words,
)

if TYPE_CHECKING:
    import tokenizers
    from torch import Tensor

OWN = ("character", "frequency", "byte", "word", "bpe")
"""The tokenizers that are made for a text."""
TOKENIZER = "tokenizer.json"
DEFAULT_SUBWORDS = 8192
# Bytes of different words that subwords are learned from, in 120 times the memory.
LEARNED_WORDS = 2 << 20
# Chinese, or a genome: the time of learning grows with the square of a word's length.
LONG_WORD = re.compile(r"\S{256}(?=\S)")
# About what byte-level BPE takes for a word.
WORD = re.compile(r"\w+|[^\w\s]+")
# What is compared on both sides of a cut. Shorter by a prime than what is beside it: in a run of digits,
# tokens start at every third one, and so in others.
COMPARED = CONTEXT // 2 - 5


class SubwordTokenizer(Tokenizer):
    """The tokenizer of Hugging Face's that ``source`` describes, the contents of its ``tokenizer.json``."""

    def __init__(self, source: str, path: str = "tokenizer.json"):
        import tokenizers

        try:
            self.inner = tokenizers.Tokenizer.from_str(source)
        except Exception as error:  # tokenizers raises plain Exception
            raise UserError(f"{path} can't be read as a tokenizer of Hugging Face's: {error}") from None
        self.inner.no_truncation()
        self.inner.no_padding()
        self._data = json.loads(source)
        self.name = str(self._data["model"].get("type", "subword")).lower()
        vocabulary = self.inner.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"expected {path} to have tokens, got none.")
        self.vocab_size = max(vocabulary.values()) + 1
        added = self._data.get("added_tokens") or ()
        splitter = self._data.get("pre_tokenizer") or {}
        self._added = [token["content"] for token in added]
        is_byte_level = splitter.get("type") == "ByteLevel"
        is_regex = is_byte_level and splitter["use_regex"] and not splitter["add_prefix_space"]
        has_strips = any(token["lstrip"] or token["rstrip"] for token in added)
        self._is_local = is_regex and not self._data.get("normalizer") and not has_strips
        """Whether no token depends on what is beyond its word, as for GPT-2."""

    @cached_property
    def is_lossless(self) -> bool:  # type: ignore[override]
        """As for GPT-2: each word becomes its bytes, and each byte has a token."""
        tokens = self.inner.get_vocab(with_added_tokens=False)
        return self._is_local and self.of_bytes is not None and tokens.keys() >= bytes_of_letters().keys()

    @cached_property
    def of_bytes(self) -> list[bytes] | None:
        """The bytes of each token; None where tokens are no bytes."""
        if (self._data.get("decoder") or {}).get("type") != "ByteLevel":
            return None
        alphabet = bytes_of_letters()
        token_bytes = [b""] * self.vocab_size
        for token, number in self.inner.get_vocab(with_added_tokens=True).items():
            is_added = token in self._added or not alphabet.keys() >= set(token)
            token_bytes[number] = bytes_of(token) if is_added else bytes(alphabet[letter] for letter in token)
        return token_bytes

    def ids(self, text: str) -> Ids:
        check_utf8(text, "the text")
        return self.ids_within([("", text, "")])[0]

    def ids_within(self, parts: Sequence[tuple[str, str, str]]) -> list[Ids]:
        if self._is_local:
            parts = [("", text, "") for _, text, _ in parts]
        texts = list(map("".join, parts))
        for text in texts:
            self._check_known(text)
        try:  # the fast one knows no offsets
            encoded = iter(self.inner.encode_batch_fast(texts, add_special_tokens=False))
        except Exception as error:  # tokenizers raises plain Exception
            what_to_do = "give it an unknown token, or use another tokenizer"
            raise UserError(f"the tokenizer can't divide the text: {error}; {what_to_do}.") from None

        # Without the tokens of what is on the left and on the right.
        result = []
        for left, text, right in parts:
            ids = np.array(next(encoded).ids, dtype=np.int64)
            n_left = sum(offset < 0 for offset, _ in self._near(left, text[:CONTEXT])) if left else 0
            n_right = sum(offset >= 0 for offset, _ in self._near(text[-CONTEXT:], right)) if right else 0
            result.append(ids[n_left : len(ids) - n_right])
        return result

    def is_cut(self, left: str, right: str) -> bool:
        if self._is_local:
            return True
        if self.name != "bpe" and not self._is_between_words(left, right[:COMPARED]):
            return False
        # The tokens around the cut are the same, however much of the text is beside them.
        with_left = self._near(left, right[:COMPARED])
        with_right = self._near(left[-COMPARED:], right)
        limit = COMPARED // 4
        return [x for x in with_left if abs(x[0]) < limit] == [x for x in with_right if abs(x[0]) < limit]

    def _is_between_words(self, left: str, right: str) -> bool:
        """A Unigram splits whole words, and rounding decides between equal ways, so words must not be cut."""
        parts = self.inner.encode(left + right, add_special_tokens=False)
        n_left = sum(start < len(left) for start, _ in parts.offsets)
        last_word = parts.word_ids[:n_left][-1:]
        next_word = parts.word_ids[n_left:][:1]
        return last_word != next_word and all(end <= len(left) for _, end in parts.offsets[:n_left])

    def _near(self, left: str, right: str) -> list[tuple[int, int]]:
        """Where each token of two texts starts, in characters from where these meet, and the token."""
        parts = self.inner.encode(left + right, add_special_tokens=False)
        tokens = []
        for (start, _), token in zip(parts.offsets, parts.ids, strict=True):
            tokens.append((start - len(left), token))
        return tokens

    def _check_known(self, text: str) -> None:
        """BPE without bytes and ``<unk>`` leaves characters out, and says nothing."""
        model = self._data["model"]
        is_whole = model.get("unk_token") is not None or model.get("byte_fallback") or self.of_bytes
        if is_whole or self.name != "bpe":
            return
        encoded = {c: self.inner.encode(c, add_special_tokens=False).ids for c in sorted(set(text))}
        if missing := [c for c, ids in encoded.items() if not ids and not c.isspace()]:
            names = ", ".join(map(repr, missing[:5]))
            raise UserError(f"the tokenizer has no token for {names}, and no <unk>; use another tokenizer.")

    def first_text(self, text: str) -> str:
        parts = self.inner.encode(text[:CONTEXT], add_special_tokens=False)
        return text[: parts.offsets[0][1]] if parts.offsets else text

    def bytes_of(self, tokens: "Tensor | Ids") -> bytes:
        if (of_bytes := self.of_bytes) is not None:
            return b"".join(of_bytes[i] for i in tokens.tolist())
        return bytes_of(self.inner.decode(tokens.tolist(), skip_special_tokens=False))

    def decoder(self) -> Callable[[int], str]:
        if self.of_bytes is not None:
            return super().decoder()
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)

        def step(token: int) -> str:
            nonlocal stream
            try:
                return stream.step(self.inner, token) or ""
            except Exception:  # a plain Exception, after bytes that are not UTF-8
                stream = DecodeStream(skip_special_tokens=False)
                return "\ufffd" + (stream.step(self.inner, token) or "")

        return step

    def to_json(self) -> Any:
        return self._data


def learn_bpe(texts: Iterable[str], vocab_size: int | None = None) -> SubwordTokenizer:
    """Byte-level BPE with GPT-2's pattern."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size is not None and not 256 <= vocab_size <= 1 << 24:
        raise UserError(f"expected vocab_size from 256, the bytes, to {1 << 24:,}, got {vocab_size:,}.")
    inner: tokenizers.Tokenizer = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    size = vocab_size or DEFAULT_SUBWORDS
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Its own bars would show "0 / 0": it doesn't know how many texts there are.
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False)
    cut = (LONG_WORD.sub(r"\g<0> ", NOT_UTF8.sub(" ", text)) for text in texts)
    in_the_background(inner.train_from_iterator, with_enough_words(cut), trainer)
    learned = inner.get_vocab_size()
    if vocab_size is not None and learned < vocab_size:
        raise UserError(f"vocab_size={vocab_size}, but the text has only {learned} subwords; use fewer.")
    return SubwordTokenizer(inner.to_str())


def with_enough_words(texts: Iterable[str]) -> Iterator[str]:
    """The first of ``texts`` that have ``LEARNED_WORDS``; there may be more of them than memory."""
    words: set[str] = set()
    size = 0
    for text in texts:
        yield text
        new = set(WORD.findall(text)) - words
        words |= new
        size += sum(len(word.encode()) for word in new)
        if size >= LEARNED_WORDS:
            break


def in_the_background(work: Callable[..., object], *args: object) -> None:
    """Wait for ``work`` of another language in a thread, so that Ctrl-C ends the wait."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work(*args)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    done.result()


def bytes_of_letters() -> dict[str, int]:
    """The byte of each letter of byte-level tokens: itself if printable, others from U+0100 on."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    hidden = (byte for byte in range(256) if chr(byte) not in letters)
    return {letter: ord(letter) if ord(letter) < 256 else next(hidden) for letter in letters}


def learn(name: str, vocab_size: int | None, pieces: Iterable[str]) -> Tokenizer:
    """The tokenizer called ``name``, one of ``OWN``, for a text in ``pieces``, cut before white space."""
    if name == "bpe":
        return learn_bpe(pieces, vocab_size)
    if name == "word":
        return learn_words(pieces, vocab_size)
    if name == "byte":
        return ByteTokenizer()
    counts = np.zeros(0x110000, dtype=np.int64)
    for piece in pieces:
        check_utf8(piece, "the text")
        counts += np.bincount(code_points(piece), minlength=len(counts))
    characters = counts.nonzero()[0]
    if name == "frequency":
        characters = characters[np.argsort(-counts[characters], kind="stable")]
    return CharacterTokenizer("".join(map(chr, characters)))


def build_tokenizer(name: str, text: str, vocab_size: int | None = None) -> Tokenizer:
    check_name(name)
    return learn(name, vocab_size, [text]) if name in OWN else load_tokenizer(Path(name))


def check_name(name: str) -> None:
    if name not in OWN and not name.endswith(".json"):
        raise UserError(f"expected tokenizer to be {', '.join(OWN)} or a {TOKENIZER}, got {name!r}.")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    write_json(folder / TOKENIZER, tokenizer.to_json())


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file, or in the ``tokenizer.json`` of a folder."""
    path = user_path(path)
    path = path / TOKENIZER if path.is_dir() or path.suffix != ".json" else path
    data = read_json(path)
    name = data.get("tokenizer")
    vocabulary = data.get("vocabulary")
    if "model" in data:
        return SubwordTokenizer(path.read_text(encoding="utf-8"), str(path))
    if name == "word" and isinstance(vocabulary, list) and all(isinstance(word, str) for word in vocabulary):
        return WordTokenizer(vocabulary)
    if name == "character" and isinstance(vocabulary, str):
        return CharacterTokenizer(vocabulary)
    if name == "ids" and "vocab_size" in data:
        return IdTokenizer(data["vocab_size"])
    if name == "byte":
        return ByteTokenizer()
    raise UserError(f"expected {path} to be a tokenizer of Hugging Face's or of ours, got {str(data)[:200]}.")
