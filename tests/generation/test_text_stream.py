"""Text read and written in a stream."""

import pytest

from memformers.data.tokenizer import CharacterTokenizer, WordTokenizer
from memformers.generation.generate import Sampling, TextStream, continue_text, make_generator
from tests.builders import small_lm

LETTERS = CharacterTokenizer("abcdefghij\n")
GREEDY = Sampling(temperature=0.0)


def written(stream, n, **options):
    return "".join(stream.write(n, GREEDY, make_generator(0, stream.device), **options))


def test_writing_ends_with_the_stop():
    lm = small_lm("transformer-xl").eval()
    text = continue_text(lm, LETTERS, "abc", 200, Sampling(), seed=3)
    stop = text[20:23]
    shorter = continue_text(lm, LETTERS, "abc", 200, Sampling(), seed=3, stop=stop)
    assert shorter == text[: text.index(stop) + 3]
    with pytest.raises(ValueError, match="max_new_tokens=-1"):
        continue_text(lm, LETTERS, "abc", -1, Sampling())


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
