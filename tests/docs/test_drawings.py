"""The drawings of the method say what is true of the models."""

import re
from xml.etree import ElementTree

import pytest
import torch

from docs.building.drawings import DRAWINGS, compressed, exactly, reached, rolled, svg
from docs.building.pictures import IMAGES, LIGHT, PICTURES, WIDTH
from docs.building.translations import LABEL, TRANSLATIONS
from memformers.models.config import MemorySizes
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


@pytest.mark.parametrize("name", PICTURES)
def test_a_committed_picture_is_what_its_function_draws(name):
    drawn = PICTURES[name]()
    committed = (IMAGES / f"{name}.svg").read_text("utf-8")
    assert committed == drawn, f"{name}.svg is old; run python -m docs.building.pictures"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_can_be_read_in_light_in_dark_and_by_those_who_cannot_see_it(name):
    drawn = PICTURES[name]()
    image = ElementTree.fromstring(drawn)
    [dark] = re.findall(r"prefers-color-scheme:dark\){svg{([^}]*)}", drawn)
    assert {variable.partition(":")[0] for variable in dark.split(";") if variable} == {
        f"--{n}" for n in LIGHT
    }
    sizes = re.findall(r"font(?:-size)?:(\d+)px", drawn)
    assert len(sizes) == 3
    assert min(map(int, sizes)) >= 12
    about = image.find("{http://www.w3.org/2000/svg}desc")
    assert image.get("width") == str(WIDTH)
    assert about is not None
    assert len(about.text) > 40


@pytest.mark.parametrize(
    ("remember", "sizes"),
    [
        (exactly(0), MemorySizes(0)),
        (exactly(8), MemorySizes(8)),
        (compressed(4, 4, 4), MemorySizes(4, 4, 4)),
        (compressed(4, 2, 4), MemorySizes(4, 2, 4)),
    ],
)
def test_a_full_memory_is_drawn_with_its_keys_and_its_reach_and_every_position_in_one_place(remember, sizes):
    *_, row = rolled(remember, segments=8)
    assert [p for first, last, _ in row for p in range(first, last + 1)] == list(range(32))
    keys = [cell for cell in row if "memory" in cell[2]]
    assert len(keys) == sizes.keys
    assert sum(last - first + 1 for first, last, _ in keys) == sizes.positions
