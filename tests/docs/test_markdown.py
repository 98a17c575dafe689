"""What pages take from the source, and the marks that lead from an equation to the lines that compute it."""

import pytest

from docs.building.markdown import excerpt, filled, relinked
from docs.building.pages import TEX, mathml, with_terms
from tests.docs.pages import read_file

LOSS = "docs.plain.compressive.reconstruction_loss"
VISIBLE = "memformers.models.documents.visible_past_keys"


def column(text):
    return f"<div markdown>\n\n{text}\n\n</div>\n"


def beside(text, *marks):
    """A text, and beside it a function with these marks at its lines."""
    asked = " ".join(["source", VISIBLE, *marks])
    source = f"<!-- {asked} -->\n<!-- end -->"
    return f'<div class="beside" markdown>\n{column(text)}{column(source)}</div>'


def test_an_excerpt_is_the_code_without_docstrings():
    path, (head, *body) = excerpt(LOSS)
    assert path == "docs/plain/compressive.py"
    assert f"\n{head}\n" in read_file(path)
    assert head.startswith("def reconstruction_loss(layer: Layer")
    line = "    return F.mse_loss(content_attention(layer, h, new), content_attention(layer, h, old))"
    assert body == [line]


def test_an_excerpt_of_some_lines_is_indented_from_the_first():
    predict = "memformers.models.language_model.MemoryLM.predict"
    _, lines = excerpt(predict, "if isinstance", "return self.head")
    assert lines == [
        "if isinstance(self.head, AdaptiveSoftmax):",
        "    return self.head(hidden, embed)",
    ]


@pytest.mark.parametrize(
    ("page", "reason"),
    [("source memformers.models.memory.gone", "no attribute 'gone'"),
     ("source memformers.models.memory", "is no function"),
     (f'source {LOSS} from "return" to "def"', "no line with 'def'"), (f"source {LOSS} until", "not under"),
     ("table gone", "no table 'gone'"), ("run gone", "no 'gone'"),
     (beside("a ①", '① "gone"'), "'gone' in 0 lines; ① needs a text of one line"),
     (beside("a ①", '① "in_slots"'), "'in_slots' in 3 lines; ① needs a text of one line"),
     (beside("a ①"), f"① needs both a text and a line, .* beside '{VISIBLE}'"),
     (beside("a", '① "in_slots ="'), f"① needs both a text and a line, .* beside '{VISIBLE}'"),
     (beside("a", '1 "in_slots ="'), "'1' is not understood; write ①"),
     ("<div>\n<!-- table reach -->\n\nmore", "no end")],
)  # fmt: skip
def test_a_page_that_shows_missing_code_is_an_error(page, reason):
    # A whole page, or only what its comment asks for.
    if not page.startswith("<"):
        page = f"<!-- {page} -->\n<!-- end -->"
    with pytest.raises(ValueError, match=reason) as error:
        filled(page)
    assert "\n" not in str(error.value)


def test_what_is_written_into_a_page_replaces_what_was_there():
    code = "\n".join(excerpt(LOSS)[1])
    page = filled(f"before\n\n<!-- source {LOSS} -->\nold\n<!-- end -->\n\nafter")
    fence = '```python title="docs/plain/compressive.py"'
    assert page == f"before\n\n<!-- source {LOSS} -->\n\n{fence}\n{code}\n```\n\n<!-- end -->\n\nafter"
    # A second time changes nothing.
    assert filled(page) == page


def test_a_mark_is_a_comment_at_the_end_of_each_of_its_lines():
    page = filled(beside("a ① and b ②", '② "return n_valid"', '① "in_slots = "', '① "+ n_visible"'))
    assert "    in_slots = n_valid - mem_len  # [B]  # ①\n" in page
    assert "    return n_valid.clamp(0, mem_len) + n_visible_slots  # ②①\n```" in page


def test_formulas_become_mathml_with_marked_terms():
    tex = r'<span class="arithmatex">\(\underset{②}{a_i &lt; b} + \overset{①}{c}\)</span>'
    page = with_terms(TEX.sub(mathml, tex))
    assert page.count("<math") == 1
    assert '<munder><mrow class="term mark-2"><msub><mi>a</mi><mi>i</mi></msub><mo>&lt;</mo>' in page
    assert '<mover><mrow class="term mark-1"><mi>c</mi></mrow><mtext>①</mtext></mover>' in page
    with pytest.raises(ValueError, match="command that can't be drawn"):
        TEX.sub(mathml, r'<div class="arithmatex">\[\nosuchcommand\]</div>')


def test_links_lead_to_pages_or_name_files():
    pages = {"CHANGELOG.md": "changelog.md"}
    kept = "[b](method.md#top), [c](https://c), [d](#d), [e](how-to/train.md), ![f](f.png)"
    # A file that is no page of the site is named without a link.
    page = relinked(f"[a](../tests/builders.py), {kept}", "docs/page.md", pages)
    assert page == f"`tests/builders.py`, {kept}"
    # Pages outside of docs/ move into it.
    page = relinked("[a](CHANGELOG.md), [b](docs/method.md#b), [c](tests)", "CONTRIBUTING.md", pages)
    assert page == "[a](changelog.md), [b](method.md#b), `tests`"
