"""labml's page loads nothing from the network."""

import re
from pathlib import Path

import labml_app

from memformers.dashboard.pages import COPIES, index_page, page_files

STATIC = Path(labml_app.__file__).parent / "static"


def test_every_file_that_labml_page_loads_is_served_here():
    files = page_files(STATIC)
    loaded = re.findall(r'(?:src|<link[^>]*\bhref)="([^"]+)"', index_page(STATIC))
    assert len(loaded) > 10
    assert not [url for url in loaded if not url.startswith("/")]
    assert sum(url in files for url in loaded if url.startswith("/local/")) == 3


def test_the_copies_are_small_and_have_their_licences():
    assert sum(path.stat().st_size for path in COPIES.rglob("*") if path.is_file()) < 700_000
    for package in COPIES.iterdir():
        assert list(package.glob("*LICENSE*")), package.name
