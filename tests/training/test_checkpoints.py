"""What a broken, foreign or poisoned checkpoint may do: nothing but be named in one line."""

import json
import pickle
import re
import shutil
from dataclasses import asdict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save_file

from memformers import MemoryLM
from memformers.common.atomic_dir import BROKEN, check_manifest, numbered
from memformers.common.command_line import plain_errors
from memformers.common.fields import changed
from memformers.common.files import config_from_dict, read_json, write_json
from memformers.convert.load import load_checkpoint as load_for_use
from memformers.models.memory import memory_tensors
from memformers.training import run as run_module
from memformers.training.checkpoints import read_checkpoint
from memformers.training.config import TrainConfig
from memformers.training.optimizers import build_optimizers
from memformers.training.resume import restore_newest
from memformers.training.run import build_model
from memformers.training.state import TrainingState
from tests.builders import Bomb, small_training
from tests.processes import run as command
from tests.training.runs import CHECKPOINTED as CONFIG
from tests.training.runs import (
    find_short_text,
    keep_two_checkpoints,
    launch,
    letters,
    reseal,
    tensors_of,
    train_run,
)

CPU = torch.device("cpu")
INFO = find_short_text(CONFIG).info
pytestmark = pytest.mark.filterwarnings("ignore:.* was made in another environment")  # with other threads
KINDS = ("whole", "parts")
"""What a single process writes, and what several do where weights are sharded."""


def parts_program(*folders, processes):
    process = launch("tests.training.parts_program", *folders, processes=processes)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    keep_two_checkpoints(folder)
    return folder


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    parts_program(folder, processes=2)
    return folder


@pytest.fixture(params=KINDS)
def run(request):
    """A run's folder with two checkpoints, of steps 5 and 6, of each kind."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run to spoil."""
    return shutil.copytree(run, tmp_path / "copy", symlinks=True)


def loaded_step(folder):
    """The step at which a training would go on in this folder; what it sets aside is put back."""
    lm = build_model(CONFIG)
    state, _ = restore_newest(folder, lm, TrainingState(build_optimizers(lm, CONFIG)), CONFIG, INFO)
    for aside in (folder / "checkpoints").glob(f"{BROKEN}*"):
        aside.rename(aside.with_name(aside.name.removeprefix(BROKEN)))
    return state.step


@given(
    data=st.data(),
    how=st.sampled_from(["flip", "cut", "grow", "gone", "folder"]),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happens_to_a_file_the_checkpoint_before_is_taken(run, data, how, where, bit, capsys):
    newest, older = numbered(run / "checkpoints")
    path = data.draw(st.sampled_from(sorted(newest.iterdir())))
    data = path.read_bytes()
    files = sorted(run.rglob("*"))
    place = int(where * (len(data) - 1))  # a manifest without its last line break is not damaged
    all_weights = [tensors_of(MemoryLM.from_pretrained(folder)) for folder in (newest, older)]
    try:
        path.unlink()
        if how == "flip":
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
        elif how == "cut":
            path.write_bytes(data[:place])
        elif how == "grow":
            path.write_bytes(data + b"\0")
        elif how == "folder":
            path.mkdir()
        capsys.readouterr()
        assert loaded_step(run) == 5
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"checkpoint {newest} is passed over: ")
        assert len(line) < 1_000
        model, _ = load_for_use(run, CPU)
        kept = tensors_of(model)
        assert any(all(torch.equal(kept[n], t) for n, t in weights.items()) for weights in all_weights)
    finally:
        if path.is_dir():
            path.rmdir()
        path.write_bytes(data)
    assert sorted(run.rglob("*")) == files
    check_manifest(newest)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(name=st.sampled_from(["state.json", "random.json", "config.json", "training.json"]), data=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_that_make_no_sense_are_passed_over_though_their_seal_is_good(run, name, data, capsys):
    newest = numbered(run / "checkpoints")[0]
    before = {path: path.read_bytes() for path in newest.iterdir()}
    content = read_json(newest / name)
    key = data.draw(st.sampled_from(sorted(content)))
    content[key] = data.draw(json_values)
    try:
        write_json(newest / name, content)
        reseal(newest)
        capsys.readouterr()
        step = loaded_step(run)
        said = capsys.readouterr().err.splitlines()
        assert not said or (step, len(said)) == (5, 1)
    finally:
        for path, old in before.items():
            path.write_bytes(old)


def test_tensors_of_another_shape_name_or_number_are_passed_over(copy, capsys):
    newest, seen = numbered(copy / "checkpoints")[0], set()
    for path in sorted(newest.glob("*.safetensors")):
        whole = path.read_bytes()
        tensors = load(whole)  # load_file may map the file that is written over below
        with safe_open(path, "pt") as file:
            facts = file.metadata()
        kinds = {
            re.sub(r"\.\d+|.*[./](?=\D)", "", key): key for key in sorted(tensors)
        }  # exp_avg, bias, c_mem, …
        for key in kinds.values():
            for spoiled in (
                tensors | {key: torch.zeros(3, 3, 3)},
                tensors | {"another": torch.zeros(3)},
                {n: t for n, t in tensors.items() if n != key},
            ):
                save_file(spoiled, path, facts)
                reseal(newest)
                assert loaded_step(copy) == 5, key
                (line,) = capsys.readouterr().err.splitlines()
                assert "is passed over" in line
        path.write_bytes(whole)
        seen |= kinds.keys()
    assert {"exp_avg", "momentum", "step", "weight", "bias", "mem", "c_mem"} <= seen
    reseal(newest)
    assert loaded_step(copy) == 6


def test_a_pickle_is_never_unpickled(run, tmp_path, capsys):
    exploded = tmp_path / "exploded"
    for name in [path.name for path in numbered(run / "checkpoints")[0].iterdir()]:
        copy = shutil.copytree(run, tmp_path / name, symlinks=True)
        newest = numbered(copy / "checkpoints")[0]
        (newest / name).write_bytes(pickle.dumps(Bomb(exploded)))
        (newest / ".metadata").write_bytes(pickle.dumps(Bomb(exploded)))
        for extra in ("pytorch_model.bin", "optimizer.pt", "state.pkl"):
            torch.save({"weights": Bomb(exploded)}, newest / extra)
        if name != "manifest.json":
            reseal(newest)
        assert loaded_step(copy) == (
            6 if name == "tokenizer.json" else 5
        )  # a training makes it from the text
        load_for_use(copy, CPU)
        if name == "config.json" or name.endswith("1.safetensors") or name.startswith("model"):
            with pytest.raises(ValueError, match=r"config\.json|safetensors"):
                MemoryLM.from_pretrained(newest)
    assert not exploded.exists()
    # Unsafe on purpose: this pickle is made here, and its code only makes a folder. Without this check, a
    # pickle whose code never runs would pass the test.
    pickle.loads(pickle.dumps(Bomb(exploded)))
    assert exploded.exists()


def test_only_broken_checkpoints_are_an_error_and_nothing_begins_anew(copy, monkeypatch, capsys):
    for folder in numbered(copy / "checkpoints"):
        for path in folder.glob("*.safetensors"):
            path.write_bytes(b"")
    files, config = sorted(copy.rglob("*")), (copy / "config.json").read_bytes()
    monkeypatch.setattr(run_module, "find_text", find_short_text)
    with pytest.raises(SystemExit) as end, plain_errors():
        train_run(changed(CONFIG, skip_bad_steps=3), copy, resume=True)
    assert end.value.code == 2
    assert "has 2 checkpoints, of which none can be used" in capsys.readouterr().err.splitlines()[-1]
    assert {*files} <= {*copy.rglob("*")}
    assert (copy / "config.json").read_bytes() == config
    with pytest.raises(ValueError, match="none can be used"):
        load_for_use(copy, CPU)


def test_a_checkpoint_of_another_training_or_version_is_passed_over(copy, capsys):
    newest = numbered(copy / "checkpoints")[0]
    facts = read_json(newest / "training.json")
    write_json(newest / "training.json", facts | {"corpus_sha256": "another"})
    reseal(newest)
    assert loaded_step(copy) == 5
    assert "it belongs to another text" in capsys.readouterr().err
    write_json(newest / "training.json", facts | {"config": asdict(changed(CONFIG, learning_rate=0.5))})
    reseal(newest)
    assert loaded_step(copy) == 5
    assert "it belongs to another training: optim.learning_rate 0.5 → 0.004" in capsys.readouterr().err
    manifest = read_json(newest / "manifest.json")
    write_json(newest / "manifest.json", manifest | {"format": 2})
    assert loaded_step(copy) == 5
    assert "has format 2; this version reads format 1" in capsys.readouterr().err


def test_a_broken_checkpoint_that_is_newer_takes_no_place_from_those_that_come(tmp_path, monkeypatch):
    """Else it would count as the newest for ever, and the good ones be deleted as older."""
    monkeypatch.setattr(run_module, "find_text", find_short_text)
    config = small_training(tokens=64 * 8, evaluations=1, checkpoint_every=64 * 2, keep_checkpoints=3)
    train_run(config, tmp_path)
    (tmp_path / "result.json").unlink()
    for broken in numbered(tmp_path / "checkpoints")[:2]:
        (broken / "model.safetensors").write_bytes(b"")
    train_run(changed(config, keep_checkpoints=1), tmp_path, resume=True)
    (newest,) = numbered(tmp_path / "checkpoints")
    assert int(newest.name) == 64 * 8
    check_manifest(newest)
    aside = sorted(path.name for path in newest.parent.glob(f"{BROKEN}*"))
    assert aside == [f"{BROKEN}{64 * step:012}" for step in (6, 8)]


@pytest.mark.parametrize(("model", "message"), [("transformer-xl", "another model"), ("compressive", "5")])
def test_a_checkpoint_of_another_model_or_batch_is_refused(model, message, copy):
    config = small_training(model=model, batch_size=5)
    lm = build_model(config)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(
            numbered(copy / "checkpoints")[0], lm, build_optimizers(lm, config), config.batch_size
        )


def test_a_checkpoint_is_a_pretrained_model(copy):
    newest = numbered(copy / "checkpoints")[0]
    model = MemoryLM.from_pretrained(newest)
    assert model.config == CONFIG.model
    with pytest.raises(ValueError, match="is the checkpoint of a training; name another folder"):
        model.save_pretrained(newest)


def test_a_checkpoint_converted_to_plain_files_is_the_same_model(run, tmp_path):
    assert command("convert", "--checkpoint", run, "--out", tmp_path / "plain", "--device", "cpu").code == 0
    assert sorted(p.name for p in (tmp_path / "plain").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    (model, tokenizer), (trained, _) = (load_for_use(folder, CPU) for folder in (tmp_path / "plain", run))
    assert tokenizer.vocabulary == letters().vocabulary
    assert all(torch.equal(x, tensors_of(model)[name]) for name, x in tensors_of(trained).items())


def test_no_process_has_more_than_its_part_of_weights_optimizer_and_memory(whole, parts):
    """Nor does one bring a tensor together, where parts_program would fail."""
    newest, of_one = (numbered(folder / "checkpoints")[0] for folder in (parts, whole))
    first, second, both = (
        sum(x.nbytes for path in folder.glob(names) for x in load(path.read_bytes()).values())
        for folder, names in ((newest, "shard-00001-*"), (newest, "shard-00002-*"), (of_one, "*.safetensors"))
    )
    assert first + second == both
    assert max(first, second) < 0.51 * both


def everything_in(checkpoint):
    """What one process reads: weights, the optimizers' state, and the memory."""
    lm = build_model(CONFIG)
    read = read_checkpoint(checkpoint, lm, build_optimizers(lm, CONFIG), CONFIG.batch_size)
    return read.weights | read.moments | memory_tensors(read.state.memory)


@pytest.mark.parametrize("kind", ["parts", pytest.param("whole", marks=pytest.mark.long)])
def test_any_number_of_processes_reads_what_others_wrote_and_one_reads_theirs(kind, request, tmp_path):
    """Twelve streams, and weights whose rows three processes don't divide."""
    written = request.getfixturevalue(kind)
    parts_program(written, tmp_path, processes=3)
    before, after = (everything_in(numbered(f)[0]) for f in (written / "checkpoints", tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_disk_that_is_full_for_one_process_is_an_error_on_all_and_leaves_nothing(parts):
    failed = parts / "failed"
    assert sorted(path.name for path in failed.iterdir()) == ["error.0", "error.1"]
    assert all("File too large" in path.read_text() for path in failed.iterdir())


@given(data=st.data())
@settings(max_examples=150)
def test_any_json_makes_a_config_or_a_plain_error(data):
    config = json.loads(json.dumps(asdict(CONFIG)))
    place = data.draw(st.sampled_from([config, config["model"]]))
    key = data.draw(st.sampled_from(sorted(place)) | st.text(max_size=5))
    place[key] = data.draw(json_values)
    try:
        made = config_from_dict(TrainConfig, config, "config.json")
    except ValueError:
        return
    assert config_from_dict(TrainConfig, json.loads(json.dumps(asdict(made))), "again") == made


def test_another_tokenizer_of_the_same_size_is_refused(copy, capsys):
    lm = build_model(CONFIG)
    how = (TrainingState(build_optimizers(lm, CONFIG)), CONFIG, INFO)
    mine = letters()
    state, _ = restore_newest(copy, lm, *how, tokenizer=mine)
    assert state.step == 6
    permuted = type(mine)(mine.vocabulary[::-1])
    with pytest.raises(ValueError, match="checkpoint"):
        restore_newest(copy, lm, *how, tokenizer=permuted)
    assert "it belongs to another tokenizer" in capsys.readouterr().err
