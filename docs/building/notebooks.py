"""A notebook as a page of Markdown and the pictures in it."""

import base64
from pathlib import Path
from typing import Any

import nbformat


def as_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """The notebook's cells and outputs as Markdown, and its figures as PNG by file name."""
    parts: list[str] = []
    figures: dict[str, bytes] = {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.replace(".ipynb)", ".md)"))
        elif cell.source:
            parts.append(f"```python\n{cell.source}\n```")
            for output in cell.outputs:
                text, png = seen(output)
                if text:
                    parts.append(f"```text\n{text}\n```")
                if png:
                    name = f"{path.stem}-{len(figures) + 1}.png"
                    figures[name] = png
                    parts.append(f"![{caption(cell.source)}]({name})")
    return "\n\n".join(parts) + "\n", figures


def seen(output: Any) -> tuple[str, bytes]:
    """The text and the picture of an output; a picture's own text, its type and size, is left out."""
    if output.output_type == "stream":
        return output.text.rstrip(), b""
    data = output.get("data", {})
    if "image/png" in data:
        return "", base64.b64decode(data["image/png"])
    return data.get("text/plain", ""), b""


def caption(source: str) -> str:
    """What a figure shows: the comment that begins its cell."""
    first = source.partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else "Figure"
