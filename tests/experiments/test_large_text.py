"""What a large text costs, at a size of moments."""

import os

import pytest

from experiments.large_text import LargeText, in_ram, main, write_words


@pytest.mark.parametrize("size", [1_001, 3_000_000])
def test_a_text_has_the_size_that_was_asked_for_and_is_utf_8(size, tmp_path):
    for name in ("a", "b"):
        write_words(tmp_path / name, size)
    raw = (tmp_path / "a").read_bytes()
    assert size <= len(raw) <= size + 1
    assert raw == (tmp_path / "b").read_bytes()
    assert "ä" in raw.decode()


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux")
def test_the_memory_of_a_process_is_what_it_holds():
    before, held = in_ram(os.getpid()), bytearray(os.urandom(2**20) * 64)
    assert in_ram(os.getpid()) - before == pytest.approx(len(held), rel=0.1)


@pytest.mark.long
def test_every_step_is_measured_and_the_killed_training_has_the_same_bits(tmp_path):
    main(LargeText(size=2_000_000, tokens=20_480, vocab_size=300, out=tmp_path / "page.md"))
    rows = [line.split(" | ") for line in (tmp_path / "page.md").read_text().splitlines() if " | " in line]
    found = {row[0].strip("| "): row[1] for row in rows}
    assert found["resumed after SIGKILL"] == "the same bits"
    for what in ("divide into bytes: memory", "divide into subwords: memory", "evaluate: memory"):
        assert 0 < int(found[what].removesuffix(" MiB").replace(",", "")) <= 500
    assert abs(int(found["… more than on a text of 1 MB"].removesuffix(" MiB").replace("−", "-"))) <= 100
