"""The documentation as a built site."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet, which hides warnings from --strict too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def pages(site):
    return {
        page.relative_to(site).as_posix(): page.read_text(encoding="utf-8") for page in site.rglob("*.html")
    }


def without_code(html):
    return re.sub(r"<(code|pre|script)\b.*?</\1>", "", html, flags=re.DOTALL)


def test_nothing_is_loaded_from_elsewhere(site):
    loads = re.compile(
        r'<(?:script|img|iframe|source)[^>]* src="(https?:)?//|<link[^>]* href="(https?:)?//[^>]*stylesheet'
    )
    for name, html in pages(site).items():
        assert not loads.search(html), name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_every_picture_is_there(site):
    pictures = 0
    for name, html in pages(site).items():
        for source in re.findall(r'<img[^>]* src="([^"]+)"', html):
            within = source.startswith("data:image/png;base64,")  # a figure of a notebook
            assert within or (site / name).parent.joinpath(source).is_file(), (name, source[:99])
            pictures += 1
    assert pictures > 20


def test_formulas_are_drawn_and_source_lines_are_there(site):
    for name, html in pages(site).items():
        text = without_code(html)
        assert "arithmatex" not in html, name
        assert "$$" not in text, name
        assert "!source" not in text, name
        assert "!table" not in text, name
    assert pages(site)["method.html"].count('<div class="formula"><math') >= 12
    method = re.sub(r"<[^>]+>", "", pages(site)["method.html"])
    assert "F.pad(position, (1, 0)).flatten(-2)" in method


def test_every_public_module_has_a_page_of_the_reference(site):
    modules = [p for p in (ROOT / "memformers").rglob("*.py") if not p.name.startswith("__")]
    for module in modules:
        name = ".".join(module.relative_to(ROOT).with_suffix("").parts)
        html = (site / "api" / f"{name}.html").read_text(encoding="utf-8")
        assert f'id="{name}"' in html
        assert not re.search(r":(func|class|meth|mod|attr):|\]\[", without_code(html)), name
