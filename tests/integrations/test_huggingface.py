"""Hugging Face's transformers around our models: generation, training, files and tokenizers."""

import json
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip(
    "transformers", reason="transformers is not installed; use pip install '.[hf]' in a clone"
)

import transformers
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module

from memformers import MemoryLM, generate
from memformers.data.builtin import write_play
from memformers.data.tokenizer import ByteTokenizer, IdTokenizer
from memformers.data.tokenizers import build_tokenizer
from memformers.integrations import huggingface
from memformers.integrations.huggingface import MemformerConfig, MemformerForCausalLM, MemoryTrainer
from memformers.runs.load import load_checkpoint, load_model_tokenizer
from memformers.training.run import load_initial
from tests.builders import MODELS, SMALL, small_lm
from tests.texts import read

pytestmark = pytest.mark.usefixtures("here")
PROMPTS = [torch.arange(n) % 11 for n in (3, 24, 10, 3)]
MASK = torch.tensor([[0] * (24 - len(p)) + [1] * len(p) for p in PROMPTS])
PADDED = torch.stack([F.pad(p, (24 - len(p), 0), value=999) for p in PROMPTS])


def wrapped(model="compressive", **changes):
    """A model of transformers, and the MemoryLM in it, which doesn't always say the same."""
    lm = small_lm(model, **changes)
    lm.embed.weight.data.mul_(5)
    lm.head.weight.data.mul_(20)
    adapter = MemformerForCausalLM(MemformerConfig(**asdict(lm.config)))
    adapter.model = lm
    return adapter.eval(), lm.eval()


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_a_padded_batch_is_continued_with_the_tokens_of_our_own_generate(model, use_cache):
    adapter, lm = wrapped(model)
    ours = torch.stack(list(generate(lm, PROMPTS, 20, temperature=0)), dim=1)
    asked = {"max_new_tokens": 20, "do_sample": False, "use_cache": use_cache}
    theirs = adapter.generate(PADDED, attention_mask=MASK, **asked)
    assert torch.equal(theirs[:, 24:], ours)
    assert len(ours.unique()) > 2


def test_a_row_that_ends_is_padded_outside_the_vocabulary_and_the_others_go_on():
    adapter, lm = wrapped()
    ours = torch.stack(list(generate(lm, PROMPTS, 20, temperature=0)), dim=1)
    end = int(ours[1, 5])
    for use_cache in (True, False):
        asked = {"eos_token_id": end, "pad_token_id": 11, "do_sample": False, "use_cache": use_cache}
        theirs = adapter.generate(PADDED, attention_mask=MASK, max_new_tokens=20, **asked)[:, 24:]
        for row, expected in zip(theirs.tolist(), ours.tolist(), strict=True):
            n = expected.index(end) + 1 if end in expected else 20
            assert row == (expected[:n] + [11] * 20)[: len(row)]
        assert (theirs == 11).any()


def test_stop_strings_and_the_pipeline_work_as_with_other_models():
    model, tokenizer = huggingface.load("compressive-shakespeare")
    prompts = ["ROMEO:\nO, speak", "Thou"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    asked = {"max_new_tokens": 40, "do_sample": False}
    whole = tokenizer.batch_decode(model.generate(**batch, **asked)[:, 15:])
    stopped = model.generate(**batch, **asked, stop_strings=[" "], tokenizer=tokenizer)
    n = max(text.index(" ") for text in whole) + 1  # all go on until the last has stopped
    assert tokenizer.batch_decode(stopped[:, 15:]) == [text[:n] for text in whole]
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    written = pipeline(prompts, batch_size=2, return_full_text=False, **asked)
    assert [row["generated_text"] for (row,) in written] == whole
    for two in pipeline(prompts, num_return_sequences=2, do_sample=True, max_new_tokens=5):
        assert len({row["generated_text"][:2] for row in two}) == 1 < len(two)


def test_beams_have_the_scores_of_the_text_that_they_found():
    adapter, _ = wrapped()
    asked = {"attention_mask": MASK, "max_new_tokens": 20, "num_beams": 3, "do_sample": False}
    asked |= {"return_dict_in_generate": True, "output_scores": True}
    beams = adapter.generate(PADDED, **asked)
    mask = F.pad(MASK, (0, 20), value=1)
    nats = adapter(beams.sequences, attention_mask=mask).logits.log_softmax(-1)[:, 23:-1]
    scores = nats.gather(2, beams.sequences[:, 24:, None]).mean((1, 2))
    assert torch.allclose(beams.sequences_scores, scores, atol=1e-5)


def test_generation_goes_on_from_a_memory_and_each_of_several_texts_too():
    adapter, lm = wrapped()
    text = torch.stack((torch.arange(28), 3 * torch.arange(28) ** 2)) % 11
    memory = adapter(text[:, :21]).cache  # three segments
    whole = adapter.generate(text, max_new_tokens=10, do_sample=False)
    rest = adapter.generate(text[:, 21:], cache=memory, max_new_tokens=10, do_sample=False)
    assert torch.equal(whole[:, 28:], rest[:, 7:])
    asked = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2, "num_return_sequences": 2}
    asked |= {"return_dict_in_generate": True, "output_scores": True}
    several = adapter.generate(text[:, 21:], cache=memory, **asked)
    for i in range(2):
        alone = adapter.generate(text[i : i + 1, 21:], cache=memory.streams([i]), **asked)
        assert torch.equal(several.sequences[2 * i : 2 * i + 2], alone.sequences)
        assert torch.allclose(several.sequences_scores[2 * i : 2 * i + 2], alone.sequences_scores, atol=1e-5)
    assert adapter(text[:, :21], use_cache=False).cache is None
    assert memory == read(lm, text[:, :21].T)[2]


def test_rows_are_read_as_alone_whatever_is_padded_and_documents_are_kept_apart():
    adapter, lm = wrapped()
    logits = adapter(PADDED, attention_mask=MASK).logits
    right = adapter(PADDED.flip(1), attention_mask=MASK.flip(1)).logits
    for i, prompt in enumerate(PROMPTS):
        assert torch.allclose(logits[i, -len(prompt) :], adapter(prompt[None]).logits[0], atol=1e-6)
        assert torch.allclose(right[i, : len(prompt)], adapter(prompt.flip(0)[None]).logits[0], atol=1e-6)
    for ids, mask in ((PADDED, MASK), (PADDED.flip(1), MASK.flip(1))):  # no memory for all to go on with
        assert adapter(ids, attention_mask=mask).cache is None
    starts = torch.zeros(4, 24, dtype=torch.bool)
    starts[2, 17] = True  # the fourth of ten tokens, after fourteen of padding
    apart = adapter(PADDED, attention_mask=MASK, doc_starts=starts).logits
    expected = lm(PROMPTS[2][:7, None], doc_starts=starts[2, 14:21, None]).logits[:, 0]
    assert torch.allclose(apart[2, 14:21], expected, atol=1e-5)
    assert not torch.allclose(apart[2, 17:], logits[2, 17:], atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("model", MODELS)
def test_weights_that_accelerate_offloads_compute_the_same(model):
    adapter, lm = wrapped(model, token_shift=True)
    logits, asked = adapter(PADDED, attention_mask=MASK).logits, {"max_new_tokens": 20, "do_sample": False}
    theirs = adapter.generate(PADDED, attention_mask=MASK, **asked)
    for offloaded in (lm, adapter):
        cpu_offload(offloaded, execution_device=torch.device("cpu"))
        assert all(weight.is_meta for weight in lm.parameters())
        torch.testing.assert_close(adapter(PADDED, attention_mask=MASK).logits, logits)
        assert torch.equal(adapter.generate(PADDED, attention_mask=MASK, **asked), theirs)
        assert torch.equal(torch.stack(list(generate(lm, PROMPTS, 20, temperature=0)), 1), theirs[:, 24:])
        remove_hook_from_module(offloaded, recurse=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda adapter: adapter(PADDED), "vocab_size=11"),
        (lambda adapter: adapter(PADDED, attention_mask=MASK[:, 1:]), "attention_mask as"),
        (lambda adapter: adapter(PROMPTS[0][None], attention_mask=torch.tensor([[1, 0, 1]])), "its ends"),
        (
            lambda adapter: adapter.generate(PADDED.flip(1), attention_mask=MASK.flip(1), max_new_tokens=2),
            "padding_side='left'",
        ),
        (lambda adapter: adapter(PROMPTS[0][None], inputs_embeds=torch.ones(1)), "inputs_embeds"),
        (lambda _: MemformerConfig(mem_lem=3), "'mem_len'"),
        (lambda _: MemformerConfig(mem_len=-3), "at least 0"),
        (lambda _: MemformerConfig(embedding="adaptive", tie_word_embeddings=True), "tie_weights"),
        (lambda _: huggingface.rows_in_order(range(9), 2, 5), "at least 10"),
        (lambda _: trained(ROWS, kind=MemoryTrainer, train_sampling_strategy="random"), "sequential"),
        (lambda _: trained(ROWS, label_smoothing_factor=0.1), "leave out label_smoothing_factor"),
        (lambda _: trained(ROWS, small_adapter(model="transformer-xl"), loss=torch.sum), "compute_loss_func"),
        (lambda adapter: adapter.train()(PROMPTS[1][None]), "computes from labels"),
        (lambda _: huggingface.tokenizer_of(IdTokenizer(9)), "not text"),
        (lambda _: huggingface.load("no such model"), "no pretrained model"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(change, message):
    with pytest.raises(ValueError, match=message) as raised:
        change(wrapped()[0])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("tied", [False, True])
def test_auto_classes_load_what_was_saved_and_a_folder_that_lacks_a_weight_is_refused(tied, tmp_path):
    adapter, lm = wrapped(mem_len=(5, 6))
    if tied:
        lm.head.weight = lm.embed.weight
        adapter.config.tie_word_embeddings = True
    adapter.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is MemformerForCausalLM
    assert again.model.config == lm.config
    assert (again.model.head.weight is again.model.embed.weight) is tied
    for parameter in again.parameters():  # mapped from the file, where they may be unaligned: other rounding
        parameter.data = parameter.data.clone()
    assert torch.equal(again(PROMPTS[1][None]).logits, adapter(PROMPTS[1][None]).logits)
    assert MemformerForCausalLM.from_pretrained(tmp_path, mem_len=3).model.config.mem_len == 3
    huggingface.tokenizer_of(build_tokenizer("character", "abcdefghijk")).save_pretrained(tmp_path)
    ours, _ = load_checkpoint(tmp_path, torch.device("cpu"))
    assert (ours.head.weight is ours.embed.weight) is tied
    assert torch.equal(ours(PROMPTS[1][:, None]).logits, lm(PROMPTS[1][:, None]).logits)
    safetensors = pytest.importorskip("safetensors.torch")
    weights = safetensors.load_file(tmp_path / "model.safetensors")
    del weights["model.transformer.norm.weight"]
    safetensors.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing_keys model\.transformer\.norm\.weight"):
        MemformerForCausalLM.from_pretrained(tmp_path)


def test_what_transformers_wrote_is_loaded_by_transformers_the_command_and_init_from(tmp_path):
    model, tokenizer = huggingface.load("compressive-shakespeare")
    model.save_pretrained(tmp_path / "theirs")
    model.model.save_pretrained(tmp_path / "ours")
    prompt = "The king\n\n  and 3: 'tis"
    expected = tokenizer(prompt).input_ids
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        tokenizer.save_pretrained(folder)
        for lm, tokens in (load_checkpoint(folder, torch.device("cpu")), load_initial(str(folder))):
            assert not lm.training
            assert lm.config == model.model.config
            assert all(map(torch.equal, lm.parameters(), model.parameters()))
            assert tokens.vocab_size == 65
            assert tokens.encode(prompt).tolist() == expected
            assert tokens.decode(torch.tensor(expected)) == prompt
        assert all(map(torch.equal, MemoryLM.from_pretrained(folder).parameters(), model.parameters()))
    with pytest.raises(ValueError, match="the tokenizer can't divide the text"):
        tokens.encode("naïve")
    theirs = tmp_path / "theirs"
    again = transformers.AutoTokenizer.from_pretrained(theirs)
    batch = again(["ROMEO:\n", "O, she doth teach the torches"], return_tensors="pt", padding=True)
    assert batch["attention_mask"].sum(1).tolist() == [7, 29]
    assert again.decode(again(prompt)["input_ids"]) == prompt
    assert transformers.AutoModelForCausalLM.from_pretrained(theirs)(**batch).logits.isfinite().all()
    settings = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(settings | {"d_ff": 100}))
    with pytest.raises(ValueError, match=r"model\.safetensors doesn't contain the weights"):
        load_checkpoint(theirs, torch.device("cpu"))


@pytest.mark.parametrize("name", ["character", "byte", "word", "bpe"])
def test_tokens_have_the_same_ids_and_text_in_transformers_and_back(name, tmp_path):
    text = write_play(3_000) + ("" if name == "character" else "\r\nnaïve – Ā 北京\n")
    tokenizer = ByteTokenizer() if name == "byte" else build_tokenizer(name, text, 300)
    theirs = huggingface.tokenizer_of(tokenizer)
    assert theirs(text)["input_ids"] == tokenizer.ids(text).tolist()
    assert theirs.pad_token_id == tokenizer.vocab_size
    expected = tokenizer.decode(tokenizer.encode(text))
    assert theirs.decode(theirs(text)["input_ids"]) == expected
    theirs.save_pretrained(tmp_path)
    ours = load_model_tokenizer(tmp_path, tokenizer.vocab_size)
    assert ours.vocab_size == tokenizer.vocab_size
    assert ours.ids(text).tolist() == tokenizer.ids(text).tolist()
    assert ours.decode(tokenizer.encode(text)) == expected
    assert "".join(map(ours.decoder(), tokenizer.ids(text).tolist())) == expected


def small_adapter(**changes):
    torch.manual_seed(0)
    return MemformerForCausalLM(MemformerConfig(**asdict(SMALL) | {"model": "compressive"} | changes))


def trained(rows, model=None, steps=6, collator=None, loss=None, *, kind=transformers.Trainer, **settings):
    """The losses that a Trainer logs, and the Trainer."""
    settings = {
        "per_device_train_batch_size": 4, "train_sampling_strategy": "sequential", "max_steps": steps,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 0.0,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
    } | settings  # fmt: skip
    arguments = transformers.TrainingArguments(output_dir="trained", **settings)
    trainer = kind(model or small_adapter(), arguments, collator, rows, rows[:4], compute_loss_func=loss)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


ROWS = huggingface.rows_in_order(torch.arange(560) ** 2 % 11, batch_size=4, length=14)


@pytest.mark.long
@pytest.mark.parametrize("kind", [transformers.Trainer, MemoryTrainer])
def test_a_trainer_learns_as_a_plain_loop_with_memory_carried_from_batch_to_batch_or_not(kind):
    losses, trainer = trained(ROWS, kind=kind, steps=12)  # an epoch has 10
    lm, memory, expected = small_adapter().model, None, []
    optimizer = torch.optim.AdamW(lm.parameters(), 1e-2, weight_decay=0.0)
    streams = torch.stack([row["input_ids"] for row in ROWS], dim=1)  # [14, 40]
    for i, batch in enumerate([*streams.split(4, dim=1), *streams.split(4, dim=1)[:2]]):
        memory, logits, auxiliary = memory if kind is MemoryTrainer and i != 10 else None, [], []
        for segment in batch.split(7):
            output = lm(segment, memory)
            memory = output.memory
            logits.append(output.logits)
            auxiliary.append(output.auxiliary_loss)
        loss = F.cross_entropy(torch.cat(logits)[:-1].flatten(0, 1), batch[1:].flatten()) + sum(auxiliary) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-4)
    logits = trainer.model.eval()(streams[:, :4].T).logits  # an evaluation has the loss of predictions alone
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), streams[1:, :4].T.flatten())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.long
def test_layers_computed_again_and_batches_in_parts_learn_the_same():
    plain, _ = trained(ROWS)
    again, trainer = trained(ROWS, activation_checkpointing=True)
    assert again == pytest.approx(plain, rel=1e-5)
    assert trainer.model.model.transformer.activation_checkpointing
    parts, _ = trained(ROWS, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert parts == pytest.approx(plain, rel=1e-2)  # compressions' losses are means of other segments


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_have_the_loss_that_they_have_one_by_one(side):
    """A row of one token has nothing to predict. Labels that are a copy of padded ids are masked."""
    tokenizer = huggingface.load("compressive-shakespeare")[1]
    tokenizer.padding_side = side
    rows = [{"input_ids": list(range(n))} for n in (3, 9, 1, 11, 6)] * 3 + [{"input_ids": [0] * 14}]
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)

    def copied(rows):
        return (batch := collate(rows)) | {"labels": batch["input_ids"]}

    losses = []
    for batch, parts, collator in ((16, 1, collate), (1, 16, collate), (16, 1, copied)):
        settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": parts}
        model = small_adapter(model="transformer-xl", vocab_size=65)
        losses.append(trained(rows, model, 1, collator, **settings)[0][0])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    with pytest.raises(ValueError, match="one length"):
        trained(rows, model, 1, collate, kind=MemoryTrainer)
    batch = collate(rows[:5])
    alone = [model(torch.tensor([row["input_ids"]])).logits[0, :-1] for row in rows[:5]]
    targets = torch.cat([torch.arange(1, len(x) + 1) for x in alone])
    wanted = F.cross_entropy(torch.cat(alone), targets).item()
    assert model(**batch).loss.item() == pytest.approx(wanted, rel=1e-5)


def padded_rows(side, lengths, *, predicted_alone):
    """Rows of ids, padded on a ``side``; with ``predicted_alone`` the first has no label."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for n in lengths:
        ids = torch.randint(1, 11, (n,), generator=generator)
        labels = ids.clone()
        if predicted_alone:
            labels[0] = -100
        width = max(lengths) - n
        ends = (width, 0) if side == "left" else (0, width)
        row = {"input_ids": F.pad(ids, ends), "attention_mask": F.pad(torch.ones_like(ids), ends)}
        rows.append(row | {"labels": F.pad(labels, ends, value=-100)})
    return rows


def loss_row_by_row(model, rows):
    """The mean over all predictions of ``rows``, each read alone and without padding."""
    total = torch.tensor(0.0)
    for row in rows:
        ids = row["input_ids"][row["attention_mask"].bool()][None]
        total = total + model(ids, labels=ids).loss * (ids.shape[1] - 1)
    return total / sum(int(row["attention_mask"].sum()) - 1 for row in rows)


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_has_the_loss_and_gradient_of_its_rows_alone(side, model):
    """Those of the compressions too."""
    batch = torch.utils.data.default_collate(padded_rows(side, (20, 5, 27, 20, 9), predicted_alone=False))
    adapter = small_adapter(model=model).train()
    losses = [
        adapter(**batch).loss,
        loss_row_by_row(adapter, padded_rows(side, (20, 5, 27, 20, 9), predicted_alone=False)),
    ]
    gradients = [torch.autograd.grad(loss, list(adapter.parameters())) for loss in losses]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for together, alone in zip(*gradients, strict=True):
        assert torch.allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_in_parts_learn_as_one(side, model):
    rows = padded_rows(side, (20, 5, 17, 9, 20, 2, 11, 11), predicted_alone=True)
    expected = loss_row_by_row(small_adapter(model=model).train(), rows[:4]).item()
    losses = []
    for parts in (1, 2, 4):
        settings = {"per_device_train_batch_size": 4 // parts, "gradient_accumulation_steps": parts}
        losses.append(trained(rows, small_adapter(model=model), 4, optim="sgd", **settings)[0])
    assert losses[0][0] == pytest.approx(expected, rel=1e-5)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # later ones after weights that changed alike
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_labels_that_nothing_predicts_are_refused_in_batches_in_parts_only():
    """The Trainer counts them before the model sees them, so the parts can't be weighed."""
    rows = padded_rows("left", (20, 5, 17, 9), predicted_alone=False)
    expected = loss_row_by_row(small_adapter().train(), rows).item()
    assert trained(rows, steps=1)[0][0] == pytest.approx(expected, rel=1e-5)
    parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    with pytest.raises(ValueError, match="padding_side='right'") as raised:
        trained(rows, steps=1, **parts)
    assert "\n" not in str(raised.value)
    copied = [
        row | {"labels": row["input_ids"]} for row in padded_rows("right", (20, 5), predicted_alone=False)
    ]
    with pytest.raises(ValueError, match="set their labels to -100"):
        trained(copied, steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=2)


def test_a_collator_of_predicted_labels_lets_batches_padded_on_the_left_be_accumulated():
    collate = transformers.DataCollatorForLanguageModeling(
        huggingface.load("compressive-shakespeare")[1], mlm=False
    )

    def collate_predicted(rows):
        batch = collate(rows)
        labels = huggingface.predicted_labels(batch["labels"], batch["attention_mask"])
        return batch | {"labels": labels}

    rows = [{"input_ids": list(range(n))} for n in (3, 9, 1, 11, 6, 6, 2, 8)]
    losses = []
    for parts in (1, 4):
        settings = {"per_device_train_batch_size": 8 // parts, "gradient_accumulation_steps": parts}
        adapter = small_adapter(vocab_size=65)
        losses.append(trained(rows, adapter, 3, collate_predicted, optim="sgd", **settings)[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_evaluation_of_padded_rows_has_the_loss_of_their_predictions(side):
    rows = padded_rows(side, (20, 5, 17, 9), predicted_alone=False)
    adapter = small_adapter()
    expected = loss_row_by_row(adapter.eval(), rows).item()
    settings = {"output_dir": "trained", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(per_device_eval_batch_size=4, **settings)
    evaluated = transformers.Trainer(adapter, arguments, eval_dataset=rows).evaluate()
    assert evaluated["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_documents_of_a_packed_row_have_the_loss_of_documents_apart():
    adapter = small_adapter(model="transformer-xl", mem_len=30).train()  # all, wherever segments end
    documents = [torch.arange(n) ** 2 % 11 for n in (9, 16, 5)]
    packed = torch.cat(documents)[None]
    starts = torch.zeros_like(packed)
    starts[0, [0, 9, 25]] = 1
    labels = packed.masked_fill(starts.bool(), -100)  # nothing in a document predicts its first id
    total = sum(adapter(x[None], labels=x[None]).loss.item() * (len(x) - 1) for x in documents)
    loss = adapter(packed, labels=labels, doc_starts=starts).loss
    assert loss.item() == pytest.approx(total / 27, rel=1e-5)


@pytest.mark.long
def test_lora_trains_its_own_weights_alone_and_is_saved_and_loaded(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed; use pip install '.[hf]' in a clone")
    adapter, lm = wrapped()
    before = {name: x.clone() for name, x in lm.state_dict().items()}
    lora = peft.LoraConfig(target_modules=["query", "value"], r=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(adapter, lora)
    trained(ROWS, model, 20, activation_checkpointing=True)
    after = {name.replace("base_layer.", ""): x for name, x in lm.state_dict().items()}
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    model.eval().save_pretrained(tmp_path)
    (fresh, plain), text = wrapped(), PROMPTS[1][None]
    plain.load_state_dict(before)
    learned = model(text).logits
    assert not torch.allclose(learned, fresh(text).logits, atol=1e-3)
    assert torch.equal(peft.PeftModel.from_pretrained(fresh, tmp_path).eval()(text).logits, learned)
    ours = torch.cat(list(generate(lm, text.T, 10, temperature=0)))
    assert torch.equal(model.generate(input_ids=text, max_new_tokens=10, do_sample=False)[0, 24:], ours)
