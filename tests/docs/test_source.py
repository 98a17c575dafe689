"""What pages take from the source."""

import pytest

from docs.building.markdown import filled, named, relinked
from docs.building.maths import with_mathml
from docs.building.source import ROOT, excerpt


def test_an_excerpt_is_the_lines_as_they_stand_without_the_docstring():
    found = excerpt("docs.plain.compressive.reconstruction_loss")
    lines = (ROOT / found.path).read_text(encoding="utf-8").splitlines()
    head, *body = found.code.splitlines()
    assert found.path == "docs/plain/compressive.py"
    assert lines[found.first_line - 1] == head
    assert head.startswith("def reconstruction_loss(layer: Layer")
    assert body == [
        "    return F.mse_loss(content_attention(layer, h, new), content_attention(layer, h, old))"
    ]


def test_an_excerpt_may_be_some_lines_of_a_method():
    found = excerpt("memformers.models.language_model.MemoryLM.predict", "if isinstance", "return self.head")
    head, body = found.code.splitlines()
    assert head == "if isinstance(self.head, AdaptiveSoftmax):"
    assert body == "    return self.head(hidden, self.embed)"
    lines = (ROOT / found.path).read_text(encoding="utf-8").splitlines()
    assert lines[found.first_line - 1].strip() == head


@pytest.mark.parametrize(
    ("line", "reason"),
    [("source memformers.models.memory.gone", "there is no 'gone'"),
     ("source memformers.gone.cut", "there is no 'gone'"),
     ("source memformers.models.memory", "is a module"),
     ('source docs.plain.compressive.reconstruction_loss from "gone"', "no line with 'gone'"),
     ('source docs.plain.compressive.reconstruction_loss from "return" to "def"', "no line with 'def'"),
     ("source docs.plain.compressive.reconstruction_loss until", "is not understood"),
     ("table gone", "no table 'gone'"),
     ("run gone", "no 'gone'")],
)  # fmt: skip
def test_a_page_can_not_outlive_what_it_shows(line, reason):
    with pytest.raises(ValueError, match=reason):
        filled(f"<!-- {line} -->\n<!-- end -->")


def test_what_a_page_asks_for_has_an_end():
    with pytest.raises(ValueError, match="no end"):
        filled("<!-- table reach -->\n\nmore")


def test_what_is_written_into_a_page_replaces_what_was_there():
    found = excerpt("docs.plain.compressive.reconstruction_loss")
    asked = "<!-- source docs.plain.compressive.reconstruction_loss -->"
    page = filled(f"before\n\n{asked}\nold\n<!-- end -->\n\nafter")
    fence = '```python title="docs/plain/compressive.py"'
    assert page == f"before\n\n{asked}\n\n{fence}\n{found.code}\n```\n\n<!-- end -->\n\nafter"
    assert filled(page) == page


def test_a_table_of_a_file_is_taken_whole():
    page = filled("<!-- table file experiments/benchmarks/RESULTS.md 1 -->\n<!-- end -->").splitlines()
    assert page[2].startswith("| case | model")
    assert page[-3].startswith("| long | compressive |")


def test_formulas_become_mathml_and_what_is_not_understood_is_an_error():
    page = with_mathml(r'<p><span class="arithmatex">\(a_i &lt; b\)</span></p>')
    assert page.count("<math") == 1
    assert "<msub><mi>a</mi><mi>i</mi></msub><mo>&#x0003C;</mo>" in page
    with pytest.raises(ValueError, match="command that can't be drawn"):
        with_mathml(r'<div class="arithmatex">\[\nosuchcommand\]</div>')


def test_links_of_a_file_of_the_repository_lead_to_pages_or_are_text():
    page = relinked("[a](A.md), [b](b.py), [c](https://c), ![d](d.png)", {"A.md": "a.md"})
    assert page == "[a](a.md), b, [c](https://c), ![d](d.png)"


def test_files_that_are_not_on_the_site_are_named():
    others = "[b](method.md#top), [c](https://c), [d](#d), [e](how-to/train.md)"
    text = f"[a](../memformers/models/memory.py), {others}"
    assert named(text, "page.md") == text.replace(
        "[a](../memformers/models/memory.py)", "`memformers/models/memory.py`"
    )
    assert named("[tests](../../tests)", "how-to/page.md") == "`tests`"
