"""The products that the kernel of a single query consists of."""

import pytest
import torch

from memformers.kernels import single
from memformers.kernels.single import by_columns, by_rows, products


@pytest.mark.parametrize("few", [1, 2])
@pytest.mark.parametrize("faster", [False, True])
def test_both_ways_give_the_same_products(few, faster, monkeypatch):
    matrices = torch.randn(3, 5, 7, dtype=torch.float64)
    vectors = torch.randn(3, few, 7, dtype=torch.float64)
    expected = torch.einsum("nrc,nfc->nfr", matrices, vectors)
    for way in (by_columns, by_rows):
        torch.testing.assert_close(way(matrices, vectors), expected, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(single, "rows_are_faster", lambda: faster)
    torch.testing.assert_close(products(matrices, vectors), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("columns", "rows", "faster"), [(1.0, 0.5, True), (1.0, 0.95, False), (0.5, 1.0, False)]
)
def test_the_clearly_faster_way_is_taken_by_its_best_time(columns, rows, faster, monkeypatch):
    times = {by_columns: iter([9.0, *[columns] * 20]), by_rows: iter([*[rows] * 20, 9.0])}
    monkeypatch.setattr(single, "seconds", lambda way, *_: next(times[way]))
    assert single.rows_are_faster.__wrapped__() is faster
