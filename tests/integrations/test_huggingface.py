"""Hugging Face's transformers around our models: generation, training, files and tokenizers."""

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip(
    "transformers", reason="transformers is not installed; use pip install '.[hf]' in a clone"
)

import transformers

from memformers import generate
from memformers.data.builtin import write_play
from memformers.data.tokenizer import ByteTokenizer, IdTokenizer
from memformers.data.tokenizers import build_tokenizer
from memformers.generation.generate import Sampling
from memformers.generation.incremental import Stepper
from memformers.integrations import huggingface
from memformers.integrations.huggingface import MemformerConfig, MemformerForCausalLM, MemoryTrainer
from tests.builders import MODELS, SMALL, small_lm

PROMPTS = [torch.arange(n) % 11 for n in (3, 24, 10, 3)]
MASK = torch.tensor([[0] * (24 - len(p)) + [1] * len(p) for p in PROMPTS])
PADDED = torch.stack([F.pad(p, (24 - len(p), 0), value=999) for p in PROMPTS])


def wrapped(model="compressive", **changes):
    """A model of transformers, and the MemoryLM in it, which doesn't always say the same."""
    own = small_lm(model, **changes)
    own.embed.weight.data.mul_(5)
    own.head.weight.data.mul_(20)
    adapter = MemformerForCausalLM(MemformerConfig(**asdict(own.config)))
    adapter.model = own
    return adapter.eval(), own.eval()


# A model without memory reads its newest segment again for each token; without a cache, it doesn't.
@pytest.mark.parametrize(
    ("model", "use_cache"), [*((model, True) for model in MODELS), *((model, False) for model in MODELS[1:])]
)
def test_a_padded_batch_is_continued_with_the_tokens_of_our_own_generate(model, use_cache):
    adapter, own = wrapped(model)
    ours = torch.stack(list(generate(own, PROMPTS, 20, temperature=0)), dim=1)
    asked = {"max_new_tokens": 20, "do_sample": False, "use_cache": use_cache}
    theirs = adapter.generate(PADDED, attention_mask=MASK, **asked)
    assert torch.equal(theirs[:, 24:], ours)
    assert len(ours.unique()) > 2


def test_a_token_is_drawn_from_the_same_distribution():
    adapter, own = wrapped()
    torch.manual_seed(1)
    theirs = adapter.generate(PROMPTS[1][None], max_new_tokens=30, do_sample=True, top_k=4, temperature=0.7)
    torch.manual_seed(1)
    stepper, ours = Stepper(own, 1), []
    stepper.read(PROMPTS[1][:, None])
    for _ in range(30):
        ours.append(Sampling(0.7, 4).draw(stepper.last.float()))
        stepper.step(ours[-1])
    assert torch.equal(theirs[0, 24:], torch.cat(ours))


def test_beams_go_on_with_the_memory_of_what_they_continue():
    adapter, _ = wrapped()
    asked = {"attention_mask": MASK, "max_new_tokens": 20, "num_beams": 3, "do_sample": False}
    with_cache, without = (adapter.generate(PADDED, use_cache=use, **asked) for use in (True, False))
    assert torch.equal(with_cache, without)


def test_generation_goes_on_from_a_memory_and_each_of_several_texts_too():
    adapter, own = wrapped()
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
    expected = None
    for segment in text[:, :21].T.split(7):
        expected = own(segment, expected).memory
    assert memory == expected


def test_rows_are_read_as_alone_whatever_is_padded_and_documents_are_kept_apart():
    adapter, own = wrapped()
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
    expected = own(PROMPTS[2][:7, None], doc_starts=starts[2, 14:21, None]).logits[:, 0]
    assert torch.allclose(apart[2, 14:21], expected, atol=1e-5)
    assert not torch.allclose(apart[2, 17:], logits[2, 17:], atol=1e-3)


@pytest.mark.parametrize(
    ("change", "said"),
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
        (lambda _: huggingface.tokenizer_of(IdTokenizer(9)), "not text"),
        (lambda _: huggingface.load("no such model"), "no pretrained model"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(change, said):
    with pytest.raises(ValueError, match=said) as raised:
        change(wrapped()[0])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("tied", [False, True])
def test_auto_classes_load_what_was_saved_and_a_folder_that_lacks_a_weight_is_refused(tied, tmp_path):
    adapter, own = wrapped(mem_len=(5, 6))
    if tied:
        own.head.weight = own.embed.weight
        adapter.config.tie_word_embeddings = True
    adapter.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is MemformerForCausalLM
    assert again.model.config == own.config
    assert (again.model.head.weight is again.model.embed.weight) is tied
    for parameter in again.parameters():  # mapped from the file, where they may be unaligned: other rounding
        parameter.data = parameter.data.clone()
    assert torch.equal(again(PROMPTS[1][None]).logits, adapter(PROMPTS[1][None]).logits)
    assert MemformerForCausalLM.from_pretrained(tmp_path, mem_len=3).model.config.mem_len == 3
    safetensors = pytest.importorskip("safetensors.torch")
    weights = safetensors.load_file(tmp_path / "model.safetensors")
    del weights["model.transformer.norm.weight"]
    safetensors.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing_keys model\.transformer\.norm\.weight"):
        MemformerForCausalLM.from_pretrained(tmp_path)


def test_a_model_of_the_package_and_its_tokenizer_become_a_folder_of_transformers(tmp_path):
    model, tokenizer = huggingface.load("compressive-shakespeare")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    batch = again(["ROMEO:\n", "O, she doth teach the torches"], return_tensors="pt", padding=True)
    assert batch["attention_mask"].sum(1).tolist() == [7, 29]
    text = "The king\n\n  and 3: 'tis"
    assert again.decode(again(text)["input_ids"]) == text
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(**batch).logits.isfinite().all()


@pytest.mark.parametrize("name", ["character", "byte", "word", "bpe"])
def test_tokens_have_the_same_ids_in_transformers(name):
    text = write_play(3_000) + ("" if name == "character" else "\r\nnaïve – Ā 北京\n")
    own = ByteTokenizer() if name == "byte" else build_tokenizer(name, text, 300)
    theirs = huggingface.tokenizer_of(own)
    assert theirs(text)["input_ids"] == own.ids(text).tolist()
    assert theirs.pad_token_id == own.vocab_size
    if name in ("character", "byte", "bpe"):
        assert theirs.decode(theirs(text)["input_ids"]) == text


def trained(kind, steps=6, model=None, **arguments):
    """The losses of a training in order, four rows at a time, and what trained."""
    torch.manual_seed(0)
    model = model or MemformerForCausalLM(MemformerConfig(**asdict(SMALL) | {"model": "compressive"}))
    rows = huggingface.rows_in_order(torch.arange(2_000) ** 2 % 11, 4, 14)
    settings = {
        "per_device_train_batch_size": 4, "train_sampling_strategy": "sequential", "max_steps": steps,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 0.0,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
    } | arguments  # fmt: skip
    arguments = transformers.TrainingArguments(output_dir="trained", **settings)
    trainer = kind(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


@pytest.fixture
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize("carries", [True, False])
def test_the_trainer_learns_in_order_as_a_loop_of_ones_own_with_memory_carried_or_not(carries):
    losses, trainer = trained(MemoryTrainer if carries else transformers.Trainer)
    torch.manual_seed(0)
    own, memory, expected = MemformerForCausalLM(trainer.model.config).model, None, []
    optimizer = torch.optim.AdamW(own.parameters(), 1e-2, weight_decay=0.0)
    streams = (torch.arange(2_000) ** 2 % 11)[: 4 * 490].view(4, 490).T
    for batch in streams.split(14)[:6]:
        memory, logits, auxiliary = memory if carries else None, [], []
        for segment in batch.split(7):
            output = own(segment, memory)
            memory = output.memory
            logits.append(output.logits)
            auxiliary.append(output.auxiliary_loss)
        loss = F.cross_entropy(torch.cat(logits)[:-1].flatten(0, 1), batch[1:].flatten()) + sum(auxiliary) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-4)
    empty = trainer.model.eval()(streams[:14].T).logits  # an evaluation has the loss of predictions alone
    loss = F.cross_entropy(empty[:, :-1].flatten(0, 1), streams[1:14].T.flatten())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.long
@pytest.mark.usefixtures("_elsewhere")
def test_layers_computed_again_and_batches_in_parts_learn_the_same():
    plain, _ = trained(MemoryTrainer)
    again, trainer = trained(MemoryTrainer, activation_checkpointing=True)
    assert again == pytest.approx(plain, rel=1e-5)
    assert trainer.model.train()(PROMPTS[0][None]).logits.requires_grad
    assert trainer.model.model.transformer.recompute
    parts, _ = trained(transformers.Trainer, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    whole, _ = trained(transformers.Trainer)
    assert parts == pytest.approx(whole, rel=1e-2)  # compressions' losses are means of other segments


@pytest.mark.long
@pytest.mark.usefixtures("_elsewhere")
def test_an_epoch_begins_with_an_empty_memory_and_random_order_is_refused():
    _, trainer = trained(MemoryTrainer, num_train_epochs=2, steps=-1, learning_rate=0.0)
    log = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert log[: len(log) // 2] == pytest.approx(log[len(log) // 2 :], rel=1e-5)
    with pytest.raises(ValueError, match="sequential"):
        trained(MemoryTrainer, train_sampling_strategy="random")


@pytest.mark.long
@pytest.mark.usefixtures("_elsewhere")
def test_padded_rows_train_without_a_memory_to_carry_and_are_refused_with_one():
    tokenizer = huggingface.load("compressive-shakespeare")[1]
    rows = [{"input_ids": torch.arange(n)} for n in (3, 9, 11, 6)]
    batch = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    adapter = MemformerForCausalLM(
        MemformerConfig(**asdict(SMALL) | {"model": "transformer-xl", "vocab_size": 65})
    )
    losses = [adapter(row["input_ids"][None], labels=row["input_ids"][None]).loss for row in rows]
    expected = sum(loss * (len(row["input_ids"]) - 1) for loss, row in zip(losses, rows, strict=True)) / 25
    assert adapter(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-5)
    _, trainer = trained(MemoryTrainer, 1, adapter)
    with pytest.raises(ValueError, match="one length"):
        trainer.compute_loss(adapter.train(), dict(batch))


@pytest.mark.long
@pytest.mark.usefixtures("_elsewhere")
def test_lora_trains_its_own_weights_alone_and_is_saved_and_loaded(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed; use pip install '.[hf]' in a clone")
    adapter, own = wrapped()
    before = {name: x.clone() for name, x in own.state_dict().items()}
    lora = peft.LoraConfig(target_modules=["query", "value"], r=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(adapter, lora)
    trained(MemoryTrainer, 20, model, activation_checkpointing=True)
    after = {name.replace("base_layer.", ""): x for name, x in own.state_dict().items()}
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    model.eval().save_pretrained(tmp_path)
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(wrapped_again(before), tmp_path).eval()
    text = PROMPTS[1][None]
    learned = model(text).logits
    assert not torch.allclose(learned, wrapped_again(before)(text).logits, atol=1e-3)
    assert torch.equal(again(text).logits, learned)
    ours = torch.cat(list(generate(own, text.T, 10, temperature=0)))
    assert torch.equal(model.generate(input_ids=text, max_new_tokens=10, do_sample=False)[0, 24:], ours)


def wrapped_again(weights):
    adapter, own = wrapped()
    own.load_state_dict(weights)
    return adapter
