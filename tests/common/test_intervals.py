import json
import math

import pytest

from memformers.common.intervals import Mean, mean_of, mean_of_groups, mean_of_known, paired


@pytest.mark.parametrize(
    ("numbers", "mean", "half_width"),
    [([0.1, 0.3], 0.2, 12.706 * 0.1),
     ([1.0, 2.0, 3.0, 4.0, 5.0], 3.0, 1.96324),  # 2.77645 · √(5/2) / √5
     ([-1.0, 1.1, 0.9], 1 / 3, 2.8792),  # 4.30265 · 1.15902 / √3: more than the mean
     *(([4.0, 6.0] * n, 5.0, t / (2 * n - 1) ** 0.5) for n, t in ((6, 2.201), (8, 2.131), (60, 1.98))),
     ([2.0] * 3, 2.0, 0.0), ([5.0], 5.0, math.nan), ([1.0, math.nan], math.nan, math.nan),
     ([math.inf, -math.inf, 1.0], math.nan, math.nan)],
)  # fmt: skip
def test_an_interval_is_students_and_may_leave_out_zero(numbers, mean, half_width):
    """By tables of Student's t."""
    for sign in (1, -1):
        interval = mean_of([sign * number for number in numbers])
        assert (interval.mean, interval.n) == (pytest.approx(sign * mean, nan_ok=True), len(numbers))
        assert interval.half_width == pytest.approx(half_width, rel=3e-4, nan_ok=True)
        assert interval.leaves_out_zero == (mean > half_width)


def test_the_mean_of_groups_weighs_them_by_their_numbers():
    equal = mean_of_groups([2.0, 4.0, 6.0], [2, 2, 2])
    assert (equal.mean, equal.half_width, equal.n) == (2.0, pytest.approx(4.303 / math.sqrt(3)), 3)
    unequal = mean_of_groups([1.0, 4.0, 0.0], [1, 3, 0])
    assert (unequal.mean, unequal.n) == (1.25, 2)
    # The residuals are −1/8 and 1/8, and so the deviation √2 / 8.
    assert unequal.half_width == pytest.approx(12.706 * 0.125)
    assert math.isnan(mean_of_groups([1.0, 0.0], [1, 0]).half_width)


def test_differences_are_paired_by_seed_where_both_have_a_number():
    ours = {0: 1.0, 1: 3.0, 2: None, 4: 9.0}
    base = {1: 2.5, 0: 0.0, 2: 1.0, 3: 7.0}
    assert paired(ours, base) == mean_of([1.0, 0.5])
    assert paired({0: 1.0}, {1: 1.0}) is None
    assert mean_of_known([None, 2.0, 4.0]) == mean_of([2.0, 4.0])
    assert mean_of_known([None]) is None


@pytest.mark.parametrize("mean", [Mean(1.0, 0.5, 3), mean_of([1.0])])
def test_a_mean_survives_json_which_has_no_nan(mean):
    written = json.dumps(mean.to_json(), allow_nan=False)
    assert repr(Mean.from_json(json.loads(written))) == repr(mean)
