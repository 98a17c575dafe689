"""A report in Markdown to one self-contained web page."""

import base64
import html
import re
from pathlib import Path

from markdown_it import MarkdownIt

from memformers.runs.folder import FIGURES

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.55 system-ui, sans-serif; color: #1b1b1b; background: #fff;
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; }}
img {{ max-width: 100%; height: auto; display: block; margin: 1.5rem auto .25rem; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; font-size: .875rem; }}
th, td {{ padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: left;
          vertical-align: top; font-variant-numeric: tabular-nums; }}
pre {{ background: #f6f6f4; padding: .8rem; overflow-x: auto; font-size: .8125rem; }}
blockquote {{ margin: 1rem 0; padding: .2rem 1rem; border-left: 4px solid #D55E00; background: #fdf3ec; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def plain(text: str) -> str:
    """Text as Markdown that shows it as it is, whatever is in it: names and settings are no markup."""
    return re.sub(r"([\\`*\[\]<>|]|\b_+|_+\b|&(?=#?\w+;))", escaped, " ".join(text.splitlines()))


def escaped(mark: re.Match[str]) -> str:
    """Each character with a backslash before it."""
    return "".join(f"\\{character}" for character in mark[0])


def render_html(markdown: str, folder: Path) -> str:
    """The report as one page with its figures inside; raw HTML in it stays text."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    for token in tokens:
        for child in token.children or []:
            if child.type == "image":
                png = (folder / str(child.attrs["src"])).resolve()
                assert png.parent == (folder / FIGURES).resolve(), png  # names are escaped: see plain
                data = base64.b64encode(png.read_bytes()).decode()
                child.attrs["src"] = f"data:image/png;base64,{data}"
    body = parser.renderer.render(tokens, parser.options, {})
    headline = "".join(child.content for child in tokens[1].children or [])  # the text, without its escapes
    return PAGE.format(title=html.escape(headline), body=body)
