"""How often tokens are drawn, what nothing is drawn from, and text read and written in a stream."""

import math

import pytest
import torch

from memformers.common.errors import UserError
from memformers.data.tokenizer import CharacterTokenizer, WordTokenizer
from memformers.generation.generate import Sampling, TextStream, continue_text, make_generator
from tests.builders import small_lm

CPU = torch.device("cpu")
# Probabilities of five tokens, and what some settings make of them.
P = [0.1, 0.5, 0.3, 0.06, 0.04]
SHARP = [p**2 / sum(q**2 for q in P) for p in P]
TWO = [0.0, 0.625, 0.375, 0.0, 0.0]
FIRST = [0.0, 1.0, 0.0, 0.0, 0.0]


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
    logits = torch.tensor([P]).log().expand(40_000, -1)
    drawn = Sampling(**settings).draw(logits, make_generator(0, CPU))
    shares = torch.bincount(drawn, minlength=5) / 40_000
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
def test_what_cant_be_drawn_from_is_an_error(do, message):
    """And so is a seed of more than 64 bits."""
    with pytest.raises(UserError, match=message):
        do()


def test_the_largest_seed_and_a_token_that_is_ruled_out_are_fine():
    assert make_generator(2**64 - 1, CPU).initial_seed()
    assert Sampling().draw(torch.tensor([[-math.inf, 0.0]])).tolist() == [1]


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


@pytest.mark.parametrize(("prompt", "separator"), [("a b", " "), ("a b\n", "")])
def test_a_word_follows_a_space_in_any_portions_but_not_a_line(prompt, separator):
    words = WordTokenizer(["<eos>", "<unk>", *"abcdefgh"])
    lm = small_lm("transformer-xl", vocab_size=words.vocab_size).eval()
    stream = TextStream(lm, words)
    stream.read(prompt)
    text = written(stream, 5) + written(stream, 4)
    at_once = TextStream(lm, words)
    at_once.read(prompt)
    assert written(at_once, 9) == text
    assert text.startswith(separator)
    prompt_ids = words.encode(prompt).tolist()
    assert words.encode(prompt + text).tolist()[: len(prompt_ids)] == prompt_ids
