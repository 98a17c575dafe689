import pytest
import torch

from memformers.common.errors import UserError
from memformers.generation.sampling import Sampling, keep_nucleus, seeded

LOGITS = torch.tensor([[0.1, 0.5, 0.3, 0.06, 0.04]]).log()


def frequencies(sampling: Sampling, draws: int = 20_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = sampling.draw(LOGITS.expand(draws, -1), generator)
    return torch.bincount(drawn, minlength=5) / draws


def close(got, wanted):
    torch.testing.assert_close(got, torch.tensor(wanted), rtol=0, atol=0.015)


def test_temperature_zero_is_greedy():
    assert Sampling(temperature=0.0).draw(LOGITS).tolist() == [1]


def test_temperature_one_draws_from_the_models_own_distribution():
    close(frequencies(Sampling()), [0.1, 0.5, 0.3, 0.06, 0.04])


def test_a_low_temperature_sharpens_and_a_tiny_one_does_not_overflow():
    sharp = torch.tensor([0.1, 0.5, 0.3, 0.06, 0.04]) ** 2
    close(frequencies(Sampling(temperature=0.5)), (sharp / sharp.sum()).tolist())
    close(frequencies(Sampling(temperature=1e-30)), [0.0, 1.0, 0.0, 0.0, 0.0])


def test_top_k_keeps_the_k_likeliest():
    close(frequencies(Sampling(top_k=2)), [0.0, 0.625, 0.375, 0.0, 0.0])
    close(frequencies(Sampling(top_k=99)), [0.1, 0.5, 0.3, 0.06, 0.04])


def test_top_p_keeps_the_likeliest_that_reach_it_and_the_one_that_crosses():
    close(frequencies(Sampling(top_p=0.79)), [0.0, 0.625, 0.375, 0.0, 0.0])
    close(frequencies(Sampling(top_p=0.81)), [1 / 9, 5 / 9, 3 / 9, 0.0, 0.0])
    close(frequencies(Sampling(top_p=1.0)), [0.1, 0.5, 0.3, 0.06, 0.04])
    assert keep_nucleus(LOGITS, 1e-9).isfinite().tolist() == [[False, True, False, False, False]]


def test_settings_beyond_the_numbers_of_float32_are_the_last_within():
    close(frequencies(Sampling(temperature=5e-324)), [0.0, 1.0, 0.0, 0.0, 0.0])
    close(frequencies(Sampling(top_p=5e-324)), [0.0, 1.0, 0.0, 0.0, 0.0])
    close(frequencies(Sampling(temperature=1e308), 40_000), [0.2, 0.2, 0.2, 0.2, 0.2])


def test_logits_that_are_infinite_draw_no_token():
    for row in ([float("inf"), 0.0], [-float("inf"), -float("inf")]):
        for temperature in (0.0, 1.0):
            with pytest.raises(UserError, match="the model's logits are infinite, so nothing can be drawn"):
                Sampling(temperature).draw(torch.tensor([row]))
    assert Sampling().draw(torch.tensor([[-float("inf"), 0.0]])).tolist() == [1], (
        "one that is ruled out may be"
    )


def test_a_seed_of_more_than_64_bits_is_an_error():
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(UserError, match=f"got seed={seed}"):
            seeded(seed, torch.device("cpu"))
    assert seeded(2**64 - 1, torch.device("cpu")).initial_seed()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_what_cannot_be_drawn_from_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)
