"""lm-evaluation-harness with our models, on tasks of a few lines that need no network."""

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm_eval is not installed; use pip install '.[lm-eval]' in a clone")
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

from memformers.convert.load import load_checkpoint
from memformers.data.builtin import write_play
from memformers.evaluation.evaluate import evaluate
from memformers.integrations.lm_eval import MemformersLM
from tests.convert.test_transfo_xl_files import FOLDER as TRANSFO_XL

pytestmark = pytest.mark.long
TEXTS = [write_play(n, seed=n) for n in (900, 2_000, 300)]
QUESTIONS = [("ROMEO:\nI love ", "thee", "xqz"), ("KING HENRY:\n", "The king", "jj jj")]
PLAY = """\
task: play
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/play.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]
"""
CHOOSE = """\
task: choose
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choose.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{[right, wrong]}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder of two tasks and what they ask."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    asked = [dict(zip(("question", "right", "wrong"), each, strict=True)) for each in QUESTIONS]
    for name, task, rows in (("play", PLAY, [{"text": text} for text in TEXTS]), ("choose", CHOOSE, asked)):
        (tmp_path / f"{name}.yaml").write_text(task.replace("FOLDER", tmp_path.as_posix()))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def bits_of(lm, texts):
    """Bits per byte, by our own evaluation of each text after a line break."""
    read = [torch.tensor([lm.eot_token_id, *lm.tok_encode(text)]) for text in texts]
    return sum(evaluate(lm.model, tokens, 1).nats for tokens in read) / math.log(2) / len("".join(texts))


def requests(*arguments):
    return [SimpleNamespace(args=each) for each in arguments]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_task_has_the_bits_of_our_own_evaluation_with_memory_carried_through_each_text(tasks, batch_size):
    import lm_eval
    from lm_eval.tasks import TaskManager

    asked = {"model_args": {"pretrained": "compressive-shakespeare"}, "batch_size": batch_size}
    manager = TaskManager(include_path=str(tasks))
    results = lm_eval.simple_evaluate(
        "memformers", tasks=["play", "choose"], task_manager=manager, bootstrap_iters=0, **asked
    )
    found, lm = results["results"], MemformersLM("compressive-shakespeare")
    assert found["play"]["bits_per_byte,none"] == pytest.approx(bits_of(lm, TEXTS), rel=1e-6)
    assert found["choose"]["acc,none"] == 1.0
    forgetful = MemformersLM("compressive-shakespeare", mem_len=0, c_mem_len=0)
    assert bits_of(forgetful, TEXTS) != pytest.approx(bits_of(lm, TEXTS), rel=1e-4)


def test_the_harnesss_own_command_knows_the_model(tasks):
    arguments = ["--model", "memformers", "--model_args", "pretrained=compressive-shakespeare,mem_len=16"]
    more = ["--tasks", "choose", "--include_path", str(tasks)]
    command = [sys.executable, "-m", "memformers.integrations.lm_eval", "run", *arguments, *more]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tasks, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "|choose|" in ended.stdout


def test_a_continuation_is_scored_after_its_context_however_the_two_are_divided_in_a_batch():
    lm = MemformersLM("compressive-shakespeare", batch_size=4)
    context = TEXTS[1][:700].rstrip()  # the harness gives white space at its end to the continuation
    rest = TEXTS[1][len(context) : 900]
    pairs = [(context, rest), ("", "a"), ("", "\n"), ("ROMEO", ":")]
    (nats, _), (alone, _), given, (_, is_likeliest) = lm.loglikelihood(requests(*pairs), disable_tqdm=True)
    tokens = lm.own_tokenizer.encode(TEXTS[1][:900])
    whole, before = (evaluate(lm.model, tokens[:n], 1).nats for n in (900, len(context)))
    assert nats == pytest.approx(before - whole, rel=1e-5)
    assert alone == pytest.approx(lm.loglikelihood_rolling(requests(("a",)), disable_tqdm=True)[0])
    assert given == (0.0, True)  # it is what stands before a text without a context
    assert is_likeliest
    assert lm.loglikelihood_rolling(requests(("",)), disable_tqdm=True) == [0.0]


def test_text_is_written_up_to_what_ends_it_and_drawn_only_if_asked_for():
    lm = MemformersLM("transformer-xl-shakespeare")
    asked = ("ROMEO:\n", {"until": ["\n", ","], "max_gen_toks": 60}), ("ROMEO:\n", {"max_gen_toks": 60})
    ended, whole = lm.generate_until(requests(*asked), disable_tqdm=True)
    assert whole.startswith(ended)
    assert 0 < len(ended) < len(whole) == 60
    drawn = lm.generate_until(requests(("ROMEO:\n", {"max_gen_toks": 60, "do_sample": True})), True)[0]
    assert drawn != whole


def test_hugging_faces_transformer_xl_has_the_loss_that_its_own_program_gave_it():
    lm, expected = MemformersLM(str(TRANSFO_XL)), json.loads((TRANSFO_XL / "expected.json").read_text())
    text = (TRANSFO_XL / "test.tokens").read_text()
    model, tokenizer = load_checkpoint(TRANSFO_XL, torch.device("cpu"))
    assert lm.tok_encode(text) == expected["ids"]
    ids = torch.tensor([lm.eot_token_id, *expected["ids"]])
    rolling = lm.loglikelihood_rolling(requests((text,)), disable_tqdm=True)[0]
    assert rolling == pytest.approx(-evaluate(model, ids, 1).nats, rel=1e-6)
    assert tokenizer.vocab_size == lm.model.config.vocab_size


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"pretrained": "nothing"}, "no pretrained model"),
        ({"batch_size": "auto"}, "batch_size"),
        ({"memlen": 3}, "memlen"),
        ({"mem_len": -1}, "mem_len"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_a_line(arguments, said):
    with pytest.raises(ValueError, match=said):
        MemformersLM(**{"pretrained": "compressive-shakespeare"} | arguments)
