"""Training with transformers' Trainer has the loss and the gradient of our models."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip(
    "transformers", reason="transformers is not installed; use pip install '.[hf]' in a clone"
)

import transformers

from memformers import generate
from memformers.integrations import huggingface
from memformers.integrations.huggingface import MemoryTrainer
from tests.integrations.adapters import PROMPTS, ROWS, small_adapter, trained, wrapped

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.long
@pytest.mark.parametrize("kind", [transformers.Trainer, MemoryTrainer])
def test_a_trainer_learns_as_a_plain_loop(kind):
    losses, trainer = trained(ROWS, kind=kind, steps=12)  # an epoch has 10
    lm = small_adapter().model
    memory = None
    expected = []
    optimizer = torch.optim.AdamW(lm.parameters(), 1e-2, weight_decay=0.0)
    streams = torch.stack([row["input_ids"] for row in ROWS], dim=1)  # [14, 40]
    for i, batch in enumerate([*streams.split(4, dim=1), *streams.split(4, dim=1)[:2]]):
        memory = memory if kind is MemoryTrainer and i != 10 else None
        logits = []
        auxiliary = []
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
    # An evaluation has the loss of predictions alone.
    logits = trainer.model.eval()(streams[:, :4].T).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), streams[1:, :4].T.flatten())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.long
def test_recomputed_layers_or_accumulated_batches_learn_the_same():
    plain, _ = trained(ROWS)
    again, trainer = trained(ROWS, activation_checkpointing=True)
    assert again == pytest.approx(plain, rel=1e-5)
    assert trainer.model.model.transformer.activation_checkpointing
    parts, _ = trained(ROWS, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    # The losses of compressions are means of other segments.
    assert parts == pytest.approx(plain, rel=1e-2)


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
def test_a_padded_batch_has_the_gradient_of_its_rows_alone(side, model):
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
def test_accumulated_padded_batches_learn_as_one(side, model):
    rows = padded_rows(side, (20, 5, 17, 9, 20, 2, 11, 11), predicted_alone=True)
    expected = loss_row_by_row(small_adapter(model=model).train(), rows[:4]).item()
    losses = []
    for parts in (1, 2, 4):
        settings = {"per_device_train_batch_size": 4 // parts, "gradient_accumulation_steps": parts}
        losses.append(trained(rows, small_adapter(model=model), 4, optim="sgd", **settings)[0])
    assert losses[0][0] == pytest.approx(expected, rel=1e-5)
    # Later losses are those after weights that changed alike.
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_unpredicted_labels_are_refused_in_accumulated_batches():
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


def test_predicted_labels_allow_accumulation_with_left_padding():
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
def test_padded_rows_have_the_loss_of_their_predictions(side):
    rows = padded_rows(side, (20, 5, 17, 9), predicted_alone=False)
    adapter = small_adapter()
    expected = loss_row_by_row(adapter.eval(), rows).item()
    settings = {"output_dir": "trained", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(per_device_eval_batch_size=4, **settings)
    evaluated = transformers.Trainer(adapter, arguments, eval_dataset=rows).evaluate()
    assert evaluated["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_packed_documents_have_the_loss_of_documents_apart():
    # The memory has all ids, wherever segments end.
    adapter = small_adapter(model="transformer-xl", mem_len=30).train()
    documents = [torch.arange(n) ** 2 % 11 for n in (9, 16, 5)]
    packed = torch.cat(documents)[None]
    starts = torch.zeros_like(packed)
    starts[0, [0, 9, 25]] = 1
    # Nothing in a document predicts its first id.
    labels = packed.masked_fill(starts.bool(), -100)
    total = sum(adapter(x[None], labels=x[None]).loss.item() * (len(x) - 1) for x in documents)
    loss = adapter(packed, labels=labels, doc_starts=starts).loss
    assert loss.item() == pytest.approx(total / 27, rel=1e-5)


@pytest.mark.long
def test_lora_trains_only_its_weights(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed; use pip install '.[hf]' in a clone")
    adapter, lm = wrapped()
    before = {name: x.clone() for name, x in lm.state_dict().items()}
    lora = peft.LoraConfig(target_modules=["query", "value"], r=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(adapter, lora)
    trained(ROWS, model, 20, activation_checkpointing=True)
    after = {name.replace("base_layer.", ""): x for name, x in lm.state_dict().items()}
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    model.eval().save_pretrained(tmp_path)
    fresh, plain = wrapped()
    text = PROMPTS[1][None]
    plain.load_state_dict(before)
    learned = model(text).logits
    assert not torch.allclose(learned, fresh(text).logits, atol=1e-3)
    assert torch.equal(peft.PeftModel.from_pretrained(fresh, tmp_path).eval()(text).logits, learned)
    ours = torch.cat(list(generate(lm, text.T, 10, temperature=0)))
    assert torch.equal(model.generate(input_ids=text, max_new_tokens=10, do_sample=False)[0, 24:], ours)
