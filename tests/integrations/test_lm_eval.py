"""lm-evaluation-harness's class for Hugging Face models around ours, on tasks of a few lines, without a
network."""

import json
import math
import os
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm_eval is not installed; make test-integrations installs it")
pytest.importorskip(
    "transformers", reason="transformers is not installed; use pip install '.[hf]' in a clone"
)
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from memformers.data.builtin import write_play
from memformers.evaluation.evaluate import evaluate
from memformers.integrations import huggingface
from tests.convert.test_transfo_xl_files import FOLDER as TRANSFO_XL

pytestmark = pytest.mark.long
TEXTS = [write_play(n, seed=n) for n in (900, 2_500, 300)]
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


def harness(pretrained="compressive-shakespeare", prefix="\n", batch_size=1, max_length=1_000_000):
    """The harness's model, and the MemoryLM and tokenizer in it."""
    model, tokenizer = huggingface.load(pretrained)
    (prefix_id,) = tokenizer(prefix).input_ids
    lm = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        max_length=max_length,
        prefix_token_id=prefix_id,
        batch_size=batch_size,
    )
    return lm, model.model, tokenizer


def nats_of(model, tokenizer, text, prefix="\n"):
    """By our own evaluation, after the prefix and with one memory for the whole text."""
    return evaluate(model, torch.tensor(tokenizer(prefix + text).input_ids), 1).nats


def requests(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_task_has_the_bits_of_our_evaluation_with_memory(batch_size, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "play.yaml").write_text(PLAY.replace("FOLDER", tmp_path.as_posix()))
    (tmp_path / "play.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    lm, model, tokenizer = harness(batch_size=batch_size)
    manager = TaskManager(include_path=str(tmp_path))
    results = lm_eval.simple_evaluate(lm, tasks=["play"], task_manager=manager, bootstrap_iters=0)["results"]
    nats = sum(nats_of(model, tokenizer, text) for text in TEXTS)
    bits = nats / math.log(2) / len("".join(TEXTS))
    assert results["play"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-6)


def test_a_continuation_is_scored_after_its_context_in_any_batch():
    lm, model, tokenizer = harness(batch_size=4)
    # The harness moves white space at the end to the continuation.
    context = TEXTS[1][:700].rstrip()
    rest = TEXTS[1][len(context) : 900]
    pairs = [(context, rest), ("", "a"), ("ROMEO", ":")]
    (nats, _), (alone, _), (_, is_likeliest) = lm.loglikelihood(requests(*pairs), disable_tqdm=True)
    ids = torch.tensor(tokenizer(TEXTS[1][:900]).input_ids)
    whole, before = (evaluate(model, ids[:n], 1).nats for n in (900, len(context)))
    assert nats == pytest.approx(before - whole, rel=1e-5)
    assert alone == pytest.approx(-nats_of(model, tokenizer, "a"), rel=1e-5)
    assert is_likeliest


def test_text_is_generated_up_to_a_stop_text_alone_and_in_a_batch():
    lm, _, tokenizer = harness("transformer-xl-shakespeare", batch_size=2)
    tokenizer.eos_token = tokenizer.pad_token  # the harness needs one
    until = {"until": ["\n", ","], "max_gen_toks": 60}
    stopped, whole = lm.generate_until(
        requests(("ROMEO:\n", until), ("ROMEO:\n", {**until, "until": []})), disable_tqdm=True
    )
    assert whole.startswith(stopped)
    assert 0 < len(stopped) < len(whole) == 60
    prompts = ("ROMEO:\n", "First Citizen:\n")
    together = lm.generate_until(requests(*((prompt, until) for prompt in prompts)), disable_tqdm=True)
    alone = [lm.generate_until(requests((prompt, until)), disable_tqdm=True)[0] for prompt in prompts]
    assert together == alone


def test_a_model_of_hugging_faces_has_the_loss_of_its_program():
    lm, model, tokenizer = harness(TRANSFO_XL, prefix="<eos>")
    expected = json.loads((TRANSFO_XL / "expected.json").read_text())
    text = (TRANSFO_XL / "test.tokens").read_text()
    assert lm.tok_encode(text) == expected["ids"]
    nats = lm.loglikelihood_rolling(requests((text,)), disable_tqdm=True)[0]
    assert nats == pytest.approx(-nats_of(model, tokenizer, text, prefix="<eos> "), rel=1e-6)
    assert evaluate(model, torch.tensor(expected["ids"]), 1).loss == pytest.approx(expected["loss"], abs=1e-6)
