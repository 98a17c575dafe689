"""The kernel of a single query over cached keys, against the naive one."""

import math

import pytest
import torch

from memformers.kernels import naive, single
from tests.kernels.against_naive import first_keys

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("columns", [[slice(2, 9)], [slice(3, 5), slice(7, 12)], [slice(4, 5)]])
@pytest.mark.parametrize("terms", [("u",), ("u", "v"), ("u", "s")])
@pytest.mark.parametrize("bounded", [False, True])
def test_single_equals_naive_over_the_keys_in_its_columns(columns, terms, bounded):
    B, H, T, E = 5, 2, 13, 3
    K = sum(run.stop - run.start for run in columns)
    shapes = {"query": (B, H, 1, E), "key": (B, H, T, E), "value": (B, H, T, E), "r": (H, K + 2, E)}
    shapes |= {"u": (H, E), "v": (H, E), "s": (H, K + 2)}
    given = {name: torch.randn(shape) for name, shape in shapes.items()}
    key_start = first_keys(B, 1, K) if bounded else None

    key, value = (torch.cat([given[n][:, :, run] for run in columns], dim=2) for n in ("key", "value"))
    used = {name: given[name] for name in terms}
    wanted = naive.relative_attention(
        given["query"],
        key,
        value,
        given["r"][:, :K],
        **used | ({"s": given["s"][:, :K]} if "s" in terms else {}),
        key_start=key_start,
    )

    scaled = {name: used[name][:, None] / math.sqrt(E) for name in terms}  # [H, 1, E]
    if "s" in terms:
        scaled["s"] = scaled["s"].flip(-1)
    got = single.relative_attention(
        given["query"] / math.sqrt(E),
        given["key"],
        given["value"].mT,
        given["r"].flip(1),
        columns,
        **scaled,
        key_start=key_start,
    )
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
