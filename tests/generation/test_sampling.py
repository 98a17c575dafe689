"""How often tokens are drawn, what nothing is drawn from, and text read and written in a stream."""

import math

import pytest
import torch

from memformers.common.errors import UserError
from memformers.data.tokenizer import CharacterTokenizer, WordTokenizer
from memformers.generation.generate import Sampling, TextStream, continue_text, make_generator
from tests.builders import small_lm

P, TWO, FIRST = [0.1, 0.5, 0.3, 0.06, 0.04], [0.0, 0.625, 0.375, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]
CPU, SHARP = torch.device("cpu"), [p**2 / sum(q**2 for q in P) for p in P]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [({}, P), ({"temperature": 0.0}, FIRST), ({"temperature": 0.5}, SHARP), ({"temperature": 1e-30}, FIRST),
     ({"top_k": 2}, TWO), ({"top_k": 99}, P), ({"top_p": 1.0}, P),
     ({"top_p": 0.79}, TWO),  # those that reach it, and the one that crosses
     ({"top_p": 0.81}, [1 / 9, 5 / 9, 3 / 9, 0.0, 0.0]),
     # Beyond the numbers of float32:
     ({"temperature": 5e-324}, FIRST), ({"top_p": 5e-324}, FIRST), ({"temperature": 1e308}, [0.2] * 5)],
)  # fmt: skip
def test_tokens_are_drawn_as_often_as_the_settings_say(settings, wanted):
    logits, generator = torch.tensor([P]).log().expand(40_000, -1), make_generator(0, CPU)
    shares = torch.bincount(Sampling(**settings).draw(logits, generator), minlength=5) / 40_000
    torch.testing.assert_close(shares, torch.tensor(wanted), rtol=0, atol=0.015)


@pytest.mark.parametrize(
    ("do", "message"),
    [*((lambda v=v: Sampling(temperature=v), f"temperature={v}") for v in (-0.5, math.nan)),
     (lambda: Sampling(top_k=0), "top_k=0"), (lambda: Sampling(top_p=0.0), "top_p=0.0"),
     (lambda: Sampling(top_p=1.5), "top_p=1.5"),
     *((lambda row=row, t=t: Sampling(t).draw(torch.tensor([row])), f"logits are {reason}")
       for row, reason in (([math.inf, 0], "infinite"), ([-math.inf] * 2, "infinite"), ([math.nan, 0], "NaN"))
       for t in (0.0, 1.0)),
     *((lambda s=s: make_generator(s, CPU), f"got seed={s}") for s in (2**64, -(2**63) - 1))],
)  # fmt: skip
def test_what_cannot_be_drawn_from_and_a_seed_of_more_than_64_bits_are_errors(do, message):
    with pytest.raises(UserError, match=message):
        do()
    assert make_generator(2**64 - 1, CPU).initial_seed()
    assert Sampling().draw(torch.tensor([[-math.inf, 0.0]])).tolist() == [1]  # one may be ruled out


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
