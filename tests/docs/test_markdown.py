"""What pages take from the source, and the marks that lead from an equation to the lines that compute it."""

import pytest

from docs.building.markdown import excerpt, filled, relinked
from docs.building.pages import TEX, mathml, with_terms
from docs.building.results import ROOT

LOSS = "docs.plain.compressive.reconstruction_loss"
SEEN = "memformers.models.documents.visible_past_keys"


def beside(text, *marks):
    source = f"<!-- {' '.join(['source', SEEN, *marks])} -->\n<!-- end -->"
    columns = "".join(f"<div markdown>\n\n{column}\n\n</div>\n" for column in (text, source))
    return f'<div class="beside" markdown>\n{columns}</div>'


def test_an_excerpt_is_the_code_without_docstrings():
    path, (head, *body) = excerpt(LOSS)
    assert path == "docs/plain/compressive.py"
    assert f"\n{head}\n" in (ROOT / path).read_text(encoding="utf-8")
    assert head.startswith("def reconstruction_loss(layer: Layer")
    line = "    return F.mse_loss(content_attention(layer, h, new), content_attention(layer, h, old))"
    assert body == [line]
    predict = excerpt(
        "memformers.models.language_model.MemoryLM.predict", "if isinstance", "return self.head"
    )
    assert predict[1] == [
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
     (beside("a ①"), f"① needs both a text and a line, .* beside '{SEEN}'"),
     (beside("a", '① "in_slots ="'), f"① needs both a text and a line, .* beside '{SEEN}'"),
     (beside("a", '1 "in_slots ="'), "'1' is not understood; write ①"),
     ("<div>\n<!-- table reach -->\n\nmore", "no end")],
)  # fmt: skip
def test_a_page_that_shows_missing_code_is_an_error(page, reason):
    with pytest.raises(ValueError, match=reason) as error:
        filled(page if page.startswith("<") else f"<!-- {page} -->\n<!-- end -->")
    assert "\n" not in str(error.value)


def test_what_is_written_into_a_page_replaces_what_was_there():
    code = "\n".join(excerpt(LOSS)[1])
    page = filled(f"before\n\n<!-- source {LOSS} -->\nold\n<!-- end -->\n\nafter")
    fence = '```python title="docs/plain/compressive.py"'
    assert page == f"before\n\n<!-- source {LOSS} -->\n\n{fence}\n{code}\n```\n\n<!-- end -->\n\nafter"
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
    same = "[b](method.md#top), [c](https://c), [d](#d), [e](how-to/train.md), ![f](f.png)"
    page = relinked(f"[a](../tests/builders.py), {same}", "docs/page.md", pages)
    assert page == f"`tests/builders.py`, {same}"
    page = relinked("[a](CHANGELOG.md), [b](docs/method.md#b), [c](tests)", "CONTRIBUTING.md", pages)
    assert page == "[a](changelog.md), [b](method.md#b), `tests`"
