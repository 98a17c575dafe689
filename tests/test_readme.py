"""What README shows runs as it is printed."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_import_example_runs_as_printed(tmp_path):
    assert len(BLOCKS) == 1
    assert len(BLOCKS[0].strip().splitlines()) <= 12
    result = subprocess.run(
        [sys.executable, "-c", BLOCKS[0]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() in README


def test_every_file_that_readme_links_to_is_there():
    links = re.findall(r"\]\((?!http|#)([^)]+)\)", README)
    assert links
    for link in links:
        assert (Path(__file__).parents[1] / link).exists(), link
