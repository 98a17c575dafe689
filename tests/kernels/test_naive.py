"""What is special to the naive kernel: explicit masks and dropout."""

import pytest
import torch

from memformers.kernels.naive import causal_mask, relative_attention
from tests.kernels.against_naive import tensors
from tests.kernels.test_kernels import one_score_at_a_time

KEY_START = torch.tensor([[0, 1, 2, 3], [2, 2, 4, 5]])


@pytest.mark.parametrize("key_start", [None, KEY_START])
def test_a_mask_hides_keys_beside_those_that_come_before_the_first(key_start):
    inputs = tensors(2, 3, 4, 6, 5, torch.float64)
    mask = causal_mask(4, 6, torch.device("cpu")).expand(2, 1, 4, 6).clone()
    mask[0, 0, 1, 1:3] = mask[1, 0, 2, :3] = False
    naive, definition = (
        attention(**inputs, mask=mask, key_start=key_start)
        for attention in (relative_attention, one_score_at_a_time)
    )
    torch.testing.assert_close(naive, definition, rtol=0, atol=1e-12)


def test_dropout_drops_whole_probabilities_and_keeps_the_mean():
    inputs = tensors(2, 3, 3, 9, 5, torch.float64) | {"value": torch.ones(2, 3, 9, 5, dtype=torch.float64)}
    dropped = torch.stack([relative_attention(**inputs, dropout_prob=0.5) for _ in range(500)])
    assert dropped.std() > 0.1
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.03)
