"""The drawings of the method say what is true of the models."""

import re

import pytest
import torch

from docs.building.drawings import DRAWINGS, LABEL, compressed, exactly, reached, rolled, svg
from memformers.models.sizes import MemorySizes
from tests.builders import COMPARED, small_lm
from tests.texts import read


@pytest.mark.parametrize("model", COMPARED)
def test_the_drawn_reach_is_that_of_a_model(model, float64):
    lm = small_lm(model, n_layers=3, segment_len=4, mem_len=4, c_mem_len=2, compression_rate=2).eval()
    text = torch.randint(9, (36, 1))
    variants = text.repeat(1, len(text) + 1)  # of the last, every token is as it was
    variants.diagonal().copy_((text[:, 0] + 1) % 9)
    *others, unchanged = read(lm, variants)[0][-1]
    changed = {i for i, logits in enumerate(others) if (logits - unchanged).abs().max() > 1e-12}
    assert reached(lm.config, len(text))[0] == changed


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_has_no_english_label_in_another_language(name):
    figure = DRAWINGS[name]()
    for language in ("zh-Hans", "si"):
        labels = LABEL.findall(svg(figure, language))
        assert len(labels) > 9
        words = set(re.findall("[A-Za-z-]{2,}", " ".join(labels)))
        assert words <= {"Transformer-XL", "Compressive", "Transformer"}
        assert any(ord(letter) > 0xD00 for label in labels for letter in label)


@pytest.mark.parametrize("sizes", [(0,), (8,), (4, 4, 4), (4, 2, 4)])
def test_a_drawn_memory_has_each_position_once(sizes):
    *_, row = rolled(compressed(*sizes) if len(sizes) > 1 else exactly(*sizes), segments=8)
    assert [p for first, last, _ in row for p in range(first, last + 1)] == list(range(32))
    keys = [cell for cell in row if "memory" in cell[2]]
    assert len(keys) == MemorySizes(*sizes).keys
    assert sum(last - first + 1 for first, last, _ in keys) == MemorySizes(*sizes).positions
