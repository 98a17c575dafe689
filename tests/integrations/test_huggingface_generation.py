"""Generation in transformers writes what our own generate writes."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip(
    "transformers", reason="transformers is not installed; use pip install '.[hf]' in a clone"
)

import transformers
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module

from memformers import generate
from memformers.integrations import huggingface
from tests.builders import MODELS
from tests.integrations.adapters import MASK, PADDED, PROMPTS, wrapped
from tests.texts import read

pytestmark = pytest.mark.usefixtures("here")
TEXTS = ["ROMEO:\nO, speak", "Thou"]
SHORT = {"max_new_tokens": 40, "do_sample": False}


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_a_padded_batch_is_continued_as_by_our_generate(model, use_cache):
    adapter, lm = wrapped(model)
    ours = torch.stack(list(generate(lm, PROMPTS, 20, temperature=0)), dim=1)
    asked = {"max_new_tokens": 20, "do_sample": False, "use_cache": use_cache}
    theirs = adapter.generate(PADDED, attention_mask=MASK, **asked)
    assert torch.equal(theirs[:, 24:], ours)
    assert len(ours.unique()) > 2


def test_a_row_that_ended_is_padded():
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


def greedy_texts(model, tokenizer, prompts):
    """40 more tokens of each prompt, as text."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    return tokenizer.batch_decode(model.generate(**batch, **SHORT)[:, batch["input_ids"].shape[1] :])


def test_stop_strings_end_the_text():
    model, tokenizer = huggingface.load("compressive-shakespeare")
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    stopped = model.generate(**batch, **SHORT, stop_strings=[" "], tokenizer=tokenizer)
    texts = greedy_texts(model, tokenizer, TEXTS)
    # All texts continue until the last has stopped.
    n = max(text.index(" ") for text in texts) + 1
    assert tokenizer.batch_decode(stopped[:, 15:]) == [text[:n] for text in texts]


def test_a_pipeline_writes_what_generate_writes():
    model, tokenizer = huggingface.load("compressive-shakespeare")
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    written = pipeline(TEXTS, batch_size=2, return_full_text=False, **SHORT)
    assert [row["generated_text"] for (row,) in written] == greedy_texts(model, tokenizer, TEXTS)
    for two in pipeline(TEXTS, num_return_sequences=2, do_sample=True, max_new_tokens=5):
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


@pytest.fixture
def text():
    return torch.stack((torch.arange(28), 3 * torch.arange(28) ** 2)) % 11


def test_generation_continues_from_a_memory(text):
    adapter, lm = wrapped()
    memory = adapter(text[:, :21]).cache  # three segments
    assert memory == read(lm, text[:, :21].T)[2]
    assert adapter(text[:, :21], use_cache=False).cache is None
    whole = adapter.generate(text, max_new_tokens=10, do_sample=False)
    rest = adapter.generate(text[:, 21:], cache=memory, max_new_tokens=10, do_sample=False)
    assert torch.equal(whole[:, 28:], rest[:, 7:])


def test_beams_of_several_texts_continue_each_from_its_memory(text):
    adapter, _ = wrapped()
    memory = adapter(text[:, :21]).cache
    asked = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2, "num_return_sequences": 2}
    asked |= {"return_dict_in_generate": True, "output_scores": True}
    several = adapter.generate(text[:, 21:], cache=memory, **asked)
    for i in range(2):
        alone = adapter.generate(text[i : i + 1, 21:], cache=memory.streams([i]), **asked)
        assert torch.equal(several.sequences[2 * i : 2 * i + 2], alone.sequences)
        assert torch.allclose(several.sequences_scores[2 * i : 2 * i + 2], alone.sequences_scores, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("model", MODELS)
def test_offloaded_weights_compute_the_same(model):
    adapter, lm = wrapped(model, token_shift=True)
    logits = adapter(PADDED, attention_mask=MASK).logits
    asked = {"max_new_tokens": 20, "do_sample": False}
    theirs = adapter.generate(PADDED, attention_mask=MASK, **asked)
    for offloaded in (lm, adapter):
        cpu_offload(offloaded, execution_device=torch.device("cpu"))
        assert all(weight.is_meta for weight in lm.parameters())
        torch.testing.assert_close(adapter(PADDED, attention_mask=MASK).logits, logits)
        assert torch.equal(adapter.generate(PADDED, attention_mask=MASK, **asked), theirs)
        assert torch.equal(torch.stack(list(generate(lm, PROMPTS, 20, temperature=0)), 1), theirs[:, 24:])
        remove_hook_from_module(offloaded, recurse=True)
