"""How often tokens are drawn, and what nothing is drawn from."""

import math

import pytest
import torch

from memformers.common.text import UserError
from memformers.generation.generate import Sampling, make_generator

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
    found = torch.bincount(Sampling(**settings).draw(logits, generator), minlength=5) / 40_000
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=0, atol=0.015)


@pytest.mark.parametrize(
    ("row", "reason"),
    [([math.inf, 0.0], "infinite"), ([-math.inf, -math.inf], "infinite"), ([math.nan, 0.0], "NaN")],
)
def test_logits_that_are_no_numbers_draw_no_token(row, reason):
    for temperature in (0.0, 1.0):
        with pytest.raises(UserError, match=f"logits are {reason}"):
            Sampling(temperature).draw(torch.tensor([row]))
    assert Sampling().draw(torch.tensor([[-math.inf, 0.0]])).tolist() == [1]  # one may be ruled out


@pytest.mark.parametrize(
    ("build", "message"),
    [*((lambda v=v: Sampling(temperature=v), f"temperature={v}") for v in (-0.5, math.nan)),
     (lambda: Sampling(top_k=0), "top_k=0"), (lambda: Sampling(top_p=0.0), "top_p=0.0"),
     (lambda: Sampling(top_p=1.5), "top_p=1.5"),
     *((lambda s=s: make_generator(s, CPU), f"got seed={s}") for s in (2**64, -(2**63) - 1))],
)  # fmt: skip
def test_what_cannot_be_drawn_from_and_a_seed_of_more_than_64_bits_are_errors(build, message):
    with pytest.raises(UserError, match=message):
        build()
    assert make_generator(2**64 - 1, CPU).initial_seed()
