"""The drawings of the method say what is true of the models."""

import re

import pytest
import torch

from docs.building.drawings import DRAWINGS, reached, svg
from docs.building.translations import LABEL, TRANSLATIONS
from tests.builders import MODELS, small_lm
from tests.texts import read


@pytest.mark.parametrize("model", MODELS)
def test_the_drawn_reach_is_that_of_a_model(model, float64):
    lm = small_lm(model, n_layers=3, segment_len=4, mem_len=4, c_mem_len=2, compression_rate=2).eval()
    text = torch.randint(9, (36, 1))
    expected = read(lm, text)[0][-1]
    changed = set()
    for i in range(len(text)):
        other = text.clone()
        other[i] = (other[i] + 1) % 9
        if not torch.equal(read(lm, other)[0][-1], expected):
            changed.add(i)
    assert reached(lm.config, len(text))[0] == changed


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_the_same_each_time(name):
    first = svg(DRAWINGS[name]())
    assert first == svg(DRAWINGS[name]())
    assert first.count("<path") > 20


@pytest.mark.parametrize("language", TRANSLATIONS)
@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_for_another_language_has_no_english_label(name, language):
    labels = LABEL.findall(svg(DRAWINGS[name](), language))
    assert len(labels) > 9
    words = set(re.findall("[A-Za-z-]{2,}", " ".join(labels)))
    assert words <= {"Transformer-XL", "Compressive", "Transformer"}
    assert any(ord(letter) > 0xD00 for label in labels for letter in label)
