"""What README and its companions link to."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_file_that_a_page_links_to_is_there(page):
    links = re.findall(r"\]\((?!http|#)([^)]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    assert links or page == "CHANGELOG.md"
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_first_example_of_readme_is_short():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first, *_ = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert len(first.strip().splitlines()) <= 12
