"""TeX to MathML, which browsers draw by themselves: no script, no font and no network."""

import html
import re

from latex2mathml.converter import convert

MARKED = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?:\((?P<inline>.*?)\\\)|\[(?P<block>.*?)\\\])</(?P=tag)>',
    re.DOTALL,
)
"""What pymdownx.arithmatex makes of ``$…$`` and ``$$…$$``, in its generic mode."""


def with_mathml(page: str) -> str:
    """The page's HTML with its marked TeX as MathML. Raises ValueError for TeX that is not understood."""
    return MARKED.sub(as_mathml, page)


def as_mathml(found: re.Match[str]) -> str:
    inline = found["inline"] is not None
    tex = html.unescape(found["inline"] if inline else found["block"]).strip()
    try:
        mathml = convert(tex, display="inline" if inline else "block")
    except Exception as error:  # its errors share no class of their own
        raise ValueError(f"the formula {tex!r} can't be drawn: {type(error).__name__} {error}") from error
    if "\\" in mathml:
        raise ValueError(f"the formula {tex!r} has a command that can't be drawn: {mathml}")
    return mathml if inline else f'<div class="formula">{mathml}</div>'
