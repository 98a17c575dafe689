"""Write the tables, commands and source lines into README and the pages of docs/, and draw the figures of the
results.

``python -m docs.building`` writes what is old; ``make docs-tables`` calls it.
"""

from pathlib import Path

from docs.building.figures import FIGURES
from docs.building.markdown import filled
from docs.building.results import ROOT
from docs.building.svg import svg


def written() -> dict[Path, str]:
    """The pages and figures, by their paths, as they should be. Raises ValueError for a page that asks for
    what is not there."""
    texts = {ROOT / f"docs/results/figures/{name}.svg": svg(draw) for name, draw in FIGURES.items()}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        try:
            texts[page] = filled(page.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{page.relative_to(ROOT)}: {error}") from None
    return texts


if __name__ == "__main__":
    for path, text in written().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
