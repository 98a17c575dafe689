"""Rows of a batch in transformers are read as alone; what can't be read or trained is refused in a line."""

import pytest
import torch

pytest.importorskip(
    "transformers", reason="transformers is not installed; use pip install '.[hf]' in a clone"
)

from memformers.data.tokenizer import IdTokenizer
from memformers.integrations import huggingface
from memformers.integrations.huggingface import MemformerConfig, MemoryTrainer
from tests.integrations.adapters import MASK, PADDED, PROMPTS, ROWS, small_adapter, trained, wrapped

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_read_as_alone(side):
    adapter, _ = wrapped()
    ids, mask = (PADDED, MASK) if side == "left" else (PADDED.flip(1), MASK.flip(1))
    output = adapter(ids, attention_mask=mask)
    for row, row_mask, logits in zip(ids, mask.bool(), output.logits, strict=True):
        alone = adapter(row[row_mask][None]).logits[0]
        assert torch.allclose(logits[row_mask], alone, atol=1e-6)
    assert output.cache is None, "no memory for all to go on with"


def test_documents_in_padded_rows_are_kept_apart():
    adapter, lm = wrapped()
    starts = torch.zeros(4, 24, dtype=torch.bool)
    starts[2, 17] = True  # the fourth of ten tokens, after fourteen of padding
    together = adapter(PADDED, attention_mask=MASK).logits
    apart = adapter(PADDED, attention_mask=MASK, doc_starts=starts).logits
    expected = lm(PROMPTS[2][:7, None], doc_starts=starts[2, 14:21, None]).logits[:, 0]
    assert torch.allclose(apart[2, 14:21], expected, atol=1e-5)
    assert not torch.allclose(apart[2, 17:], together[2, 17:], atol=1e-3)


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
def test_wrong_use_is_refused_in_a_line(change, message):
    with pytest.raises(ValueError, match=message) as raised:
        change(wrapped()[0])
    assert "\n" not in str(raised.value)
