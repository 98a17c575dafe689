"""The marks that lead from an equation to the lines that compute it."""

import re

import pytest

from docs.building.markdown import filled
from docs.building.marks import BESIDE, MARKS, with_terms
from docs.building.maths import with_mathml
from docs.building.source import ROOT

SEEN = "memformers.models.memory.visible_past_keys"


def beside(text, *marks):
    columns = "".join(f"<div markdown>\n\n{column}\n\n</div>\n" for column in (text, source(*marks)))
    return f'<div class="beside" markdown>\n{columns}</div>'


def source(*marks):
    return f"<!-- {' '.join(['source', SEEN, *marks])} -->\n<!-- end -->"


def test_a_mark_is_a_comment_at_the_end_of_each_of_its_lines():
    page = filled(beside("a ① and b ②", '② "return valid"', '① "slots = "', '① "+ slots"'))
    assert '    slots = (valid - mem_len).div(rate, rounding_mode="floor")  # ①\n' in page
    assert "    return valid.clamp(0, mem_len) + slots.clamp(0, c_mem_len)  # ②①\n```" in page


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (beside("a ①", '① "gone"'), "no line with 'gone'; change ① to a text"),
        (beside("a ①", '① "slots"'), "shows 2 lines with 'slots'; change ① to a text"),
        (beside("a ①"), f"① has no line; below '{SEEN}', add a line: ①"),
        (beside("a", '① "slots ="'), f"① has no text; put it .*, beside '{SEEN}"),
        (beside("a", '1 "slots ="'), "'1' is not understood; write ①"),
        (source('① "slots ="'), 'has no text beside it; put both in a <div class="be'),
    ],
)  # fmt: skip
def test_a_mark_without_a_line_or_without_a_text_is_an_error_of_one_line(page, reason):
    with pytest.raises(ValueError, match=reason) as error:
        filled(page)
    assert "\n" not in str(error.value)


def test_a_mark_below_a_term_gives_the_term_its_class():
    formula = with_mathml(
        r'<span class="arithmatex">\(\underset{②}{a + b} + \frac{\overset{①}{c}}{d}\)</span>'
    )
    page = with_terms(formula)
    assert (
        '<munder><mrow class="term mark-2"><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mtext>②</mtext></munder>'
        in page
    )
    assert '<mover><mrow class="term mark-1"><mi>c</mi></mrow><mtext>①</mtext></mover>' in page


def test_every_equation_of_the_method_that_has_code_beside_it_has_a_mark():
    blocks = BESIDE.findall((ROOT / "docs/method.md").read_text(encoding="utf-8"))
    equations = [tex for block in blocks for tex in re.findall(r"\$\$(.+?)\$\$", block, flags=re.DOTALL)]
    assert len(blocks) >= 14
    assert len(equations) >= 16
    assert [tex for tex in equations if not set(tex) & set(MARKS)] == []
