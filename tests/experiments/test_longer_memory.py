"""The experiment on the length of memory, at a size of moments."""

from dataclasses import replace

import pytest

from experiments import longer_memory as program
from experiments.longer_memory import LongerMemory, save_figure, write_tables
from memformers.common.errors import UserError
from memformers.models.config import ModelConfig
from memformers.training.config import TrainConfig
from tests.builders import small_training
from tests.report.fake_runs import data_of, fake_comparison


def test_every_arm_differs_from_transformer_xl_in_its_memory_only():
    config = LongerMemory(scale=0.5).comparison.experiment()
    memories = {"model", "mem_len", "c_mem_len", "compression_rate", "compression_start", "memory_warmup"}
    names = [arm.name for arm in config.arms]
    assert names[:2] == ["transformer", "transformer-xl"]
    assert len(set(names)) == len(names) == 14
    for arm in config.arms:
        assert {name.removeprefix("model.") for name in arm.settings} <= memories, arm.name
    assert config.train.model.mem_len == 64
    assert config.train.tokens == TrainConfig().tokens // 2


@pytest.fixture
def small(monkeypatch, quick_runs):
    """Settings of a moment."""
    network = ModelConfig("compressive", d_model=16, heads=2, n_layers=1, d_ff=16, segment_len=16, mem_len=8)
    monkeypatch.setattr(program, "BASE", replace(small_training(tokens=128), model=network))
    monkeypatch.setattr(program, "LENGTHS", ("M-16: mem_len=16",))
    monkeypatch.setattr(program, "GROWING", ("M-16-grows: mem_len=16 memory_warmup=0.5",))
    slots = "slots: model=compressive mem_len=8 c_mem_len=8 compression_rate=2"
    monkeypatch.setattr(program, "COMPRESSED", (slots,))


@pytest.mark.usefixtures("small")
def test_the_program_trains_every_memory_and_draws_each_by_its_keys_and_difference(tmp_path):
    settings = LongerMemory(
        data="builtin", out=tmp_path / "a", seeds=2, scale=1, causes=False, evaluations=1, dashboard="off"
    )
    settings.run()
    rows = {row["arm"]: row for row in data_of(tmp_path / "a", "longer_memory")}
    assert {name: float(row["keys"]) for name, row in rows.items()} == {
        "transformer": 0, "transformer-xl": 8, "M-16": 16, "slots": 16, "M-16-grows": 16
    }  # fmt: skip
    column = "bits per character, minus the base's"
    assert float(rows["transformer-xl"][column]) == 0
    assert rows["slots"]["seeds"] == "2"
    assert any(float(row[column]) for row in rows.values())
    assert (tmp_path / "a/figures/longer_memory.svg").is_file()
    with pytest.raises(UserError, match="to resume as --out"):
        replace(settings, out=None, resume=True).run()


def test_the_differences_are_paired_by_seed_with_their_interval(tmp_path):
    folder = tmp_path / "a"
    bits = {"transformer": [2.5, 2.7], "transformer-xl": [2.25, 2.25], "M-128": [2.0, 2.2]}
    fake_comparison(folder, bits, keys={"transformer": 0, "transformer-xl": 64, "M-128": 128})
    save_figure(folder, tmp_path / "figures" / "longer_memory.png")
    none, base, longer = data_of(tmp_path, "longer_memory")
    assert float(none["bits per character, minus the base's"]) == pytest.approx(0.35)
    assert float(none["half width of the 95 % interval"]) == pytest.approx(12.706 * 0.1)
    assert float(base["half width of the 95 % interval"]) == 0
    assert float(longer["bits per character, minus the base's"]) == pytest.approx(-0.15)


def test_a_growing_memory_is_paired_with_the_same_memory_from_the_beginning(tmp_path):
    bits = {"transformer-xl": [2.3, 2.4], "M-128": [2.5, 2.7]}
    bits |= {"M-128-grows": [2.25, 2.25], "M-64-grows": [2.2, 2.2]}
    fake_comparison(tmp_path / "a", bits, keys=dict.fromkeys(bits, 64))
    write_tables(tmp_path / "a")
    _, _, first, second, both = (tmp_path / "a/growth.md").read_text().splitlines()
    assert first == "| M-128 | 2.6000 ± 1.2706 | 2.2500 ± 0.0000 | −0.3500 ± 1.2706 | 2 |"
    assert second.startswith("| M-64 | 2.3500 ± 0.6353 | 2.2000 ± 0.0000 | −0.1500 ± 0.6353 |")
    assert both == "| mean of these memories |  |  | −0.2500 ± 0.9530 | 2 |"
    _, _, base, *others = (tmp_path / "a/beginning.md").read_text().splitlines()
    assert (
        base == "| Transformer-XL | 0.875 ± 0.000 | – |"
    )  # of the records after 300 and 400 of 2,000 tokens
    assert others[0] == "| M-128 | 0.875 ± 0.000 | +0.0000 ± 0.0000 |"
    assert len(others) == 3
    _, _, first, second = (tmp_path / "a/growing.md").read_text().splitlines()
    assert first == "| M-128-grows | 2.2500 ± 0.0000 | – |"
    assert second == "| M-64-grows | 2.2000 ± 0.0000 | −0.0500 ± 0.0000 |"
