"""Whatever the command is given, it does its work or ends with one line, and no file is lost."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from memformers.commands import train as train_command
from memformers.common.files import read_json
from memformers.tracking import discovery
from memformers.training.config import TrainConfig
from tests.builders import SMALL_RUN
from tests.processes import check_plain, run

MANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
FEW = settings(MANY, max_examples=40)

INTEGERS = ["-1", "0", "1", "2", "3", "007", "1.5", "nan", "", "x", "1e3", "--", "²", "9" * 30]
NUMBERS = ["-1", "0", "0.5", "1", "2.0", "nan", "-inf", "inf", "1e999", "", "x", "0x10"]
WORDS = [
    "", "x", "auto", "blocked", "compressive", "learned", "bfloat16", "cpu", "off", "🙂", "../..", "--help",
    "\ud800",
]  # fmt: skip
FLAGS = [None, "x"]


def options(**kinds: list) -> st.SearchStrategy[list[str]]:
    """Some of the options of these names, with values of their kind and of others."""
    one = st.sampled_from(sorted(kinds)).flatmap(
        lambda name: st.sampled_from(kinds[name]).map(
            lambda value: [f"--{name.replace('_', '-')}"] + ([] if value is None else [value])
        )
    )
    return st.lists(one, max_size=4).map(lambda pairs: [word for pair in pairs for word in pair])


TRAINING = options(
    model=WORDS, d_model=INTEGERS, heads=INTEGERS, n_layers=INTEGERS, d_ff=INTEGERS, dropout=NUMBERS,
    positions=WORDS, position_features=INTEGERS, kernel=WORDS, norm=WORDS, cutoffs=INTEGERS,
    segment_len=INTEGERS, mem_len=INTEGERS, c_mem_len=INTEGERS, compression_rate=INTEGERS,
    clamp_len=INTEGERS, tokens=INTEGERS,
    batch_size=INTEGERS, learning_rate=NUMBERS, warmup=NUMBERS, weight_decay=NUMBERS, max_grad_norm=NUMBERS,
    seed=INTEGERS, device=WORDS, precision=WORDS, compile=FLAGS, parallel=WORDS, accumulate=INTEGERS,
    evaluations=INTEGERS, evaluation_share=NUMBERS, log_every=INTEGERS, checkpoint_every=INTEGERS,
    keep_checkpoints=INTEGERS,
    skip_bad_steps=INTEGERS, activation_checkpointing=FLAGS, resume=WORDS, dashboard=WORDS, data=WORDS,
    no_such_option=WORDS,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path, monkeypatch):
    """Where a run that is begun by mistake does no harm."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _nothing_lost(request):
    """The files of ``trained``, if the test uses it, are the same before and after."""
    before = files(request.getfixturevalue("trained")) if "trained" in request.fixturenames else {}
    yield
    if before:
        after = files(request.getfixturevalue("trained"))
        assert {name: after.get(name) for name in before} == before


def files(folder: Path) -> dict[str, bytes]:
    """What is in each file of a folder."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@MANY
@given(arguments=TRAINING)
@example(arguments=["--data", ""])
def test_any_training_options_make_a_config_or_a_plain_error(arguments):
    """Nothing is trained here: what reaches the training is a config that checks itself."""
    configs = []

    def remember(config, folder, dashboard, resume):
        configs.append((config, discovery.find_dashboard(dashboard)))
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_command, "train_run", remember)
        ended = run("train", *arguments)
    check_plain(ended)
    assert all(isinstance(config, TrainConfig) for config, _ in configs)


GENERATE = options(
    prompt=WORDS, prompt_file=WORDS, tokens=["-1", "0", "3", "x"], temperature=NUMBERS, top_k=INTEGERS,
    top_p=NUMBERS, stop=WORDS, seed=INTEGERS, interactive=FLAGS, load_memory=WORDS,
    save_memory=[".", "/proc/no", "memory"], device=WORDS,
)  # fmt: skip
EVALUATE = options(streams=INTEGERS, segment_len=INTEGERS, mem_len=INTEGERS[:-1], c_mem_len=INTEGERS[:-1],
                   out=["/proc/no", "out"], device=WORDS)  # fmt: skip


@FEW
@given(arguments=GENERATE)
def test_any_options_of_generate_write_or_are_a_plain_error(trained, arguments):
    check_plain(run("generate", "--checkpoint", str(trained), "--tokens", "9", *arguments))


@FEW
@given(arguments=EVALUATE, text=st.sampled_from(["enough.txt", "-", "", "."]))
def test_any_options_of_evaluate_measure_or_are_a_plain_error(trained, arguments, text):
    Path("enough.txt").write_text("First Witch:\n" * 30)
    check_plain(run("evaluate", "--checkpoint", str(trained), "--text", text, *arguments))


@FEW
@given(arguments=options(checkpoint=WORDS, text=WORDS, models=WORDS, out=WORDS, folder=WORDS), data=st.data())
def test_a_wrong_place_is_a_plain_error_for_every_command(arguments, data):
    command = data.draw(st.sampled_from(["generate", "evaluate", "probe", "report", "", "no-such-command"]))
    check_plain(run(*[command][: len(command)], *arguments))


CORPORA = st.one_of(
    st.binary(max_size=3000),
    st.text(max_size=3000).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.text(min_size=1, max_size=20).map(lambda text: text.encode("utf-16")),
    st.integers(0, 200_000).map(lambda n: b"a" * n),
    st.text("ab \n", min_size=1, max_size=30).map(lambda text: text.encode() * 150),
    st.binary(min_size=1, max_size=4).map(lambda tail: b"Who's there? " * 200 + tail),
)


@pytest.mark.usefixtures("quick_runs")
@FEW
@given(content=CORPORA)
@example(content=b"")
@example(content=b"\n" * 5000)
@example(content=b"\xef\xbb\xbf" + b"Nay, answer me. " * 200)
@example(content=b"\x00" * 5000)
@example(content="one line, and a long one, 長い".encode() * 20_000)
def test_any_file_is_trained_on_or_a_plain_error_and_is_never_changed(content, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    book = folder / "book.txt"
    book.write_bytes(content)
    ended = run("train", *SMALL_RUN, "--tokens", "128", "--data", str(book), "--out", str(folder / "run"))
    check_plain(ended)
    assert book.read_bytes() == content
    assert (folder / "run" / "result.json").exists() == (ended.code == 0)
    if ended.code == 0:
        tokenizer = next((folder / "run" / "checkpoints").glob("0*")) / "tokenizer.json"
        assert read_json(tokenizer)["vocabulary"]


def test_a_model_too_large_for_the_memory_is_a_plain_error():
    ended = run(
        "train", "--data", "builtin", "--d-model", str(1 << 42), "--heads", "1", "--d-ff", "8", "--out", "run"
    )
    assert ended.code == 2
    check_plain(ended)
    assert "memory" in ended.err
