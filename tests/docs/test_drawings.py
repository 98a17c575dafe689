"""The drawings of the method say what is true of the models."""

import re

import pytest
import torch

from docs.building.drawings import DRAWINGS, LABEL, compressed, exactly, reached, rolled, svg
from memformers.models.sizes import MemorySizes
from tests.builders import COMPARED, small_lm
from tests.texts import read

SINHALA_OR_CHINESE = re.compile("[\u0d80-\u0dff\u4e00-\u9fff]")


@pytest.mark.parametrize("model", COMPARED)
def test_the_drawn_reach_is_that_of_a_model(model, float64):
    lm = small_lm(model, n_layers=3, segment_len=4, mem_len=4, c_mem_len=2, compression_rate=2).eval()
    text = torch.randint(9, (36, 1))
    # Each column of the batch has another token changed; the last column has none.
    variants = text.repeat(1, len(text) + 1)
    variants.diagonal().copy_((text[:, 0] + 1) % 9)
    *changed_logits, unchanged = read(lm, variants)[0][-1]
    changed = set()
    for position, logits in enumerate(changed_logits):
        if (logits - unchanged).abs().max() > 1e-12:
            changed.add(position)
    assert reached(lm.config, len(text))[0] == changed


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_has_no_english_label_in_another_language(name):
    figure = DRAWINGS[name]()
    for language in ("zh-Hans", "si"):
        labels = LABEL.findall(svg(figure, language))
        assert len(labels) > 9
        text = " ".join(labels)
        # Names of models stay as they are; single letters are variables.
        english = set(re.findall("[A-Za-z-]{2,}", text))
        assert english <= {"Transformer-XL", "Compressive", "Transformer"}, language
        assert SINHALA_OR_CHINESE.search(text)


@pytest.mark.parametrize("sizes", [(0,), (8,), (4, 4, 4), (4, 2, 4)])
def test_a_drawn_memory_has_each_position_once(sizes):
    drawn = compressed(*sizes) if len(sizes) > 1 else exactly(*sizes)
    *_, row = rolled(drawn, segments=8)
    positions = []
    n_keys = 0
    n_remembered = 0
    for first, last, kind in row:
        positions.extend(range(first, last + 1))
        if "memory" in kind:
            n_keys += 1
            n_remembered += last - first + 1
    # A cell is a position or a slot of several; rows end with the segment's own positions.
    assert positions == list(range(32))
    assert n_keys == MemorySizes(*sizes).keys
    assert n_remembered == MemorySizes(*sizes).positions
