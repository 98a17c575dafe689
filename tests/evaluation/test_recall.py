import pytest
import torch

from memformers.data.builtin import Repeat
from memformers.evaluation.evaluate import Evaluation
from memformers.evaluation.recall import FORETELLING, measure_recall


def evaluation(right: range, n: int = 2_000, stream_length: int = 2_000) -> Evaluation:
    """An evaluation in which exactly the characters ``right`` were predicted."""
    correct = torch.zeros(n - 1, dtype=torch.bool)
    for character in right:
        correct[character - 1] = True
    return Evaluation(1.0, 0.0, None, torch.ones(len(correct)), correct, stream_length)


def test_second_sayings_count_by_distance_and_first_ones_as_chance():
    near, far = Repeat(100, 120, 20), Repeat(400, 1_000, 20)
    recall = measure_recall(evaluation(range(120, 140)), [near, far])
    by_edge = dict(zip(recall.nearest, recall.accuracy, strict=True))
    assert by_edge[16] == 1.0
    assert by_edge[512] == 0.0
    assert by_edge[64] is None
    assert recall.chance == 0.0
    assert sum(recall.characters) == 2 * (20 - FORETELLING)


def test_chance_is_the_accuracy_on_first_sayings():
    recall = measure_recall(evaluation(range(100, 114)), [Repeat(100, 120, 20)])
    assert recall.chance == pytest.approx((14 - FORETELLING) / (20 - FORETELLING))


def test_a_repeat_across_two_streams_does_not_count():
    recall = measure_recall(evaluation(range(1, 2_000), stream_length=500), [Repeat(490, 600, 20)])
    assert set(recall.accuracy) == {None}
    assert recall.chance is None
