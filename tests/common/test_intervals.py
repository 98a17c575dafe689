import math

import pytest

from memformers.common.intervals import mean_of


@pytest.mark.parametrize(
    ("numbers", "mean", "half_width"),
    [
        ([0.1, 0.3], 0.2, 12.706 * 0.1),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 3.0, 1.96324),  # 2.77645 · √(5/2) / √5
        ([1.64, 1.66, 1.65, 1.63], 1.645, 0.020542),  # 3.18245 · 0.0129099 / 2
        ([2.0] * 3, 2.0, 0.0),
    ],
)
def test_an_interval_is_students(numbers, mean, half_width):
    found = mean_of(numbers)
    assert (found.mean, found.n) == (pytest.approx(mean), len(numbers))
    assert found.half_width == pytest.approx(half_width, rel=3e-4)


def test_a_single_number_has_no_interval_and_leaves_nothing_out():
    found = mean_of([5.0])
    assert found.mean == 5.0
    assert math.isnan(found.half_width)
    assert not found.leaves_out_zero


def test_an_interval_leaves_out_zero_where_the_mean_is_farther_from_it_than_half_its_width():
    assert mean_of([1.0, 1.1, 0.9]).leaves_out_zero
    assert mean_of([-1.0, -1.1, -0.9]).leaves_out_zero
    assert not mean_of([-1.0, 1.1, 0.9]).leaves_out_zero
