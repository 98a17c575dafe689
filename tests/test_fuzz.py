"""Hostile options and prompts of the command: each does its work or ends with a plain error, and no file is
lost or changed but the one that was named as the output.

``MEMFORMERS_FUZZ=10000 .venv/bin/python -m pytest tests/test_fuzz.py`` tries 10,000 in place of some dozens.
"""

import os
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from memformers.commands import train as train_command
from memformers.commands.evaluate import Evaluate
from memformers.commands.generate import Generate, Sampling
from memformers.common.fields import annotations_of
from memformers.common.files import read_json
from memformers.data.tokenizer import ByteTokenizer, CharacterTokenizer
from memformers.data.tokenizers import save_tokenizer
from memformers.evaluation.learning import LearnConfig
from memformers.models.config import AdaptiveConfig, ModelConfig
from memformers.tracking import discovery
from memformers.training.api import TrainedModel
from memformers.training.config import TrainConfig
from tests.builders import small_lm
from tests.processes import check_plain, run

pytestmark = pytest.mark.usefixtures("here")
# How many inputs all of this module tries.
INPUTS = int(os.environ.get("MEMFORMERS_FUZZ", "40"))
LETTERS = "abcdefghij\n"
MODELS = {
    "xl": {"model": "transformer-xl", "positions": "learned"},
    "compressive": {"model": "compressive"},
    "bytes": {"model": "compressive", "vocab_size": 256},
    "post-norm": {"model": "transformer-xl", "norm": "post", "same_length": True, "clamp_len": 3},
}  # fmt: skip
sampled = st.sampled_from


def parts(text):
    """The words of ``text``, and an empty one after a space at its end."""
    return text.split(" ")


def share(part: float) -> settings:
    """Settings that try this part of the inputs."""
    examples = max(round(INPUTS * part), 1)
    phases = set(Phase) - {Phase.explain}
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck), phases=phases)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of small models."""
    folder = tmp_path_factory.mktemp("models")
    for name, options in MODELS.items():
        small_lm(**options).save_pretrained(folder / name)
        save_tokenizer(ByteTokenizer() if name == "bytes" else CharacterTokenizer(LETTERS), folder / name)
    return folder


class UserFolder:
    """The current folder, filled anew with a user's files and ``more_files``, and the models beside it."""

    def __init__(self, models: Path, **more_files: bytes):
        for path in Path().iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        Path("folder").mkdir()
        weights = (models / "xl" / "model.safetensors").read_bytes()
        files = {"notes.txt": b"abc\nabc\n" * 20, "folder/evaluation.json": b"{}", "weights": weights}
        for name, content in (files | more_files).items():
            Path(name).write_bytes(content)
        Path("link").symlink_to("weights")
        Path("dangling").symlink_to("nowhere")
        self.models = models
        self.files_at_start = self.files()

    def files(self) -> dict[str, bytes]:
        """What is in each file here and of the models."""
        contents = {}
        for path in (*Path().rglob("*"), *self.models.rglob("*")):
            if path.is_file():
                contents[os.path.realpath(path)] = path.read_bytes()
        return contents

    def check_nothing_lost(self, *outputs: str) -> None:
        """Every file is as it was but the ``outputs``, which may be new or others, and aren't lost."""
        files = self.files()
        may_change = {os.path.realpath(path) for path in outputs if path}
        changed = set()
        for path in {*files, *self.files_at_start}:
            if files.get(path) != self.files_at_start.get(path):
                changed.add(path)
        assert changed <= may_change
        assert may_change & {*self.files_at_start} <= {*files}


PATHS = parts("notes.txt weights link dangling new folder gone/new notes.txt/new -x . /dev/null /proc/no ")
PATHS += ["/proc/self/mem", "\udcff", "a" * 300, "🙂"]
INTEGERS = parts("-1 0 1 2 3 5 7 1e1 1e-1 1.5 007 +3 1_0 ² nan inf x None True -- 1e99 1e999 ")
INTEGERS += [" 2", "9" * 5000]
# Where integers of 32 and of 64 bits end.
for number in (2**31, 2**63 - 1, 2**63, 2**64, 10**30):
    INTEGERS += [str(number), str(-number)]
NUMBERS = parts("-1 0 -0.0 0.5 1 2.0 nan -inf inf 1e999 1e-999 5e-324 1e308 x 0x10 None 1_0 ")
DEVICES = parts("cpu auto cpu:0 cpu:7 meta mps cuda:99 xla hpu opengl x 🙂 \udcff ")
WORDS = parts("x auto blocked compressive learned bfloat16 cpu off 🙂 ../.. --help \ud800 bpe wsd ")
# Numbers of tokens to write; those written one after the other have no end at 1e99.
TOKEN_COUNTS = ["-1", "0", "1", "3", "1e1", "1.5", "x", "", "nan"]

HOSTILE = st.one_of(
    # With lone surrogates and control characters.
    st.text(st.characters(exclude_characters="\0"), max_size=30),
    sampled(
        ["\x1b[31m\x07", "\r\n", "\ufeffabc", "\udcff", "\ud800", "a\u0301", "𝄞", "--", "-x", "\x7f\x9b"]
    ),
    st.integers(0, 600).map(lambda n: "ab" * n),
)
# What may be in a text file.
CONTENTS = st.one_of(
    st.binary(max_size=200),
    st.text(st.characters(), max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.text(min_size=1, max_size=20).map(lambda text: text.encode("utf-16")),
    st.binary(max_size=4).map(lambda tail: b"abcdefgh\r\n" * 20 + tail),
    sampled([b"", b"\x1a", b"a" * 1600, b"\xef\xbb\xbf" + b"abc" * 200, b"\n" * 200, b"\0" * 200]),
)


@st.composite
def options(draw, **kinds):
    """Some of the options of these names, with values of their kind: ``(name, value)``; a value of None is a
    flag."""
    names = draw(st.lists(sampled(sorted(kinds)), max_size=4))
    return [(name, draw(kinds[name])) for name in names]


def words(chosen):
    """The options as words of a command line."""
    line = []
    for name, value in chosen:
        option = f"--{name.replace('_', '-')}"
        line.append(option if value is None else f"{option}={value}")
    return line


def kinds_of(*configs, but=(), **special):
    """A kind of values for each option of the ``configs``, by its type or as ``special`` says."""
    by_type = {
        "bool": sampled([None, "x"]),
        "int": sampled(INTEGERS),
        "float": sampled(NUMBERS),
        "Path": sampled(PATHS),
    }
    kinds = {}
    for config in configs:
        annotations = annotations_of(config)
        for field in fields(config):
            named = re.search(r"\b(bool|int|float|Path)\b", str(annotations[field.name]))
            kinds[field.name] = by_type[named[0]] if named else sampled(WORDS)
    return {name: kind for name, kind in (kinds | special).items() if name not in but}


# Options that name the model, which each test names itself.
NOT_HERE = ("checkpoint", "pretrained", "sampling", "model")
GENERATE = options(
    **kinds_of(
        Generate,
        Sampling,
        but=NOT_HERE,
        prompt=HOSTILE,
        stop=HOSTILE,
        prompt_file=sampled([*PATHS, "-"]),
        tokens=sampled(TOKEN_COUNTS),
        device=sampled(DEVICES),
        interactive=st.none(),
    )
)
EVALUATE = options(
    **kinds_of(Evaluate, LearnConfig, but=(*NOT_HERE, "text", "learning"), device=sampled(DEVICES),
               out=sampled([path for path in PATHS if path != "/dev/null"]))
)  # fmt: skip
TRAINING = options(
    **kinds_of(TrainConfig, ModelConfig, AdaptiveConfig, but=("adaptive", "own"), model=sampled(WORDS)),
    resume=sampled(WORDS), dashboard=sampled(WORDS), no_such_option=sampled(WORDS),
)  # fmt: skip
ANYTHING = options(**dict.fromkeys(("checkpoint", "text", "models", "out", "folder"), sampled(WORDS)))
CHECKPOINTS = sampled([*MODELS] * 4 + ["", "xl/config.json", "gone", "../..", "🙂", "\udcff"])


READING = st.one_of(st.tuples(st.just("generate"), GENERATE), st.tuples(st.just("evaluate"), EVALUATE))


@share(0.6)
@pytest.mark.filterwarnings("default:.*left out")  # files of a folder that are no text
@given(model=CHECKPOINTS, reading=READING, content=CONTENTS, source=sampled(["text"] * 3 + ["-", *PATHS]))
def test_a_command_changes_only_its_outputs_or_is_a_plain_error(model, reading, content, source, models):
    folder = UserFolder(models, text=content)
    command, chosen = reading
    outs = [path for name, path in chosen if name == "out" and path]
    first = ("tokens", 3) if command == "generate" else ("text", source)
    ended = run(command, *words([("checkpoint", models / model), first, *chosen]), input=content)
    check_plain(ended)
    names = ("evaluation.json", "loss_by_position.png", "loss_over_text.png")
    folder.check_nothing_lost(*(f"{out}/{name}" for out in outs for name in names))
    if outs and ended.code == 0:
        read_json(Path(outs[-1], "evaluation.json"))


@share(0.3)
@given(
    chosen=TRAINING, command=sampled(parts("generate evaluate probe report no-such-command ")), wrong=ANYTHING
)
@example(chosen=[("data", "")], command="", wrong=[])
def test_any_training_options_make_a_config_or_a_plain_error(chosen, command, wrong):
    """Nothing is trained here: what reaches the training is a config that checks itself."""
    configs = []

    def remember(config, folder, *, dashboard, **_):
        configs.append((config, discovery.find_dashboard(dashboard)))
        return TrainedModel(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_command, "train_run", remember)
        check_plain(run("train", *words(chosen)))
    check_plain(run(*command.split(), *words(wrong)))
    assert all(isinstance(config, TrainConfig) for config, _ in configs)
