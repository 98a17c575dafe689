"""Text read and written in a stream, and the memory of it saved and taken up again."""

import pytest

from memformers.data.tokenizers import ByteTokenizer, CharacterTokenizer, WordTokenizer
from memformers.generation.memory_file import (
    load_memory,
    save_memory,
)
from memformers.generation.sampling import Sampling, seeded
from memformers.generation.text import TextStream, continue_text
from tests.builders import small_lm

LETTERS = CharacterTokenizer("abcdefghij\n")
GREEDY = Sampling(temperature=0.0)


def written(stream, n, **options):
    return "".join(stream.write(n, GREEDY, seeded(0, stream.device), **options))


def test_a_memory_of_another_model_or_a_broken_one_is_an_error(tmp_path):
    path = tmp_path / "memory.safetensors"
    stream = TextStream(small_lm("transformer-xl"), LETTERS)
    with pytest.raises(ValueError, match="nothing was read yet"):
        save_memory(stream.reader, path)
    stream.read("abc")
    save_memory(stream.reader, path)
    other = small_lm("transformer-xl")  # the same shape, but other weights
    with pytest.raises(ValueError, match="memory of another model, or of other weights"):
        load_memory(other, path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="can't be read as a saved memory"):
        load_memory(stream.model, path)
    with pytest.raises(ValueError, match="can't be read as a saved memory"):
        load_memory(stream.model, tmp_path / "gone")
    without = TextStream(small_lm("transformer"), LETTERS)
    without.read("abc")
    with pytest.raises(ValueError, match="has no memory to save"):
        save_memory(without.reader, path)


def test_writing_ends_with_the_stop():
    lm = small_lm("transformer-xl").eval()
    text = continue_text(lm, LETTERS, "abc", 200, Sampling(), seed=3)
    stop = text[20:23]
    shorter = continue_text(lm, LETTERS, "abc", 200, Sampling(), seed=3, stop=stop)
    assert shorter == text[: text.index(stop) + 3]


def test_a_character_of_several_bytes_comes_when_it_is_whole():
    decode = ByteTokenizer().decoder()
    assert [decode(byte) for byte in "aß€".encode()] == ["a", "", "ß", "", "", "€"]


@pytest.mark.parametrize(("prompt", "before"), [("a b", " "), ("a b\n", "")])
def test_a_word_follows_a_space_and_a_line_none_in_the_prompt_and_in_portions(prompt, before):
    words = WordTokenizer(["<eos>", "<unk>", *"abcdefgh"])
    lm = small_lm("transformer-xl", vocab_size=words.vocab_size).eval()
    stream = TextStream(lm, words)
    stream.read(prompt)
    text = written(stream, 5) + written(stream, 4)
    again = TextStream(lm, words)
    again.read(prompt)
    assert written(again, 9) == text
    assert text.startswith(before)
    assert words.encode(prompt + text).tolist()[: len(words.encode(prompt))] == words.encode(prompt).tolist()
