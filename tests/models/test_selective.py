"""The selective memory keeps what its definition says; that it satisfies what every memory must is tested in
test_contract.py."""

import pytest
import torch

from memformers import MemoryLM, ModelConfig
from memformers.models.rules.selective import select_novel
from tests.builders import fill_zeros
from tests.texts import gradients, read, same

TINY = {"vocab_size": 7, "d_model": 8, "n_heads": 2, "n_layers": 1, "d_ff": 8, "segment_len": 5}


@pytest.mark.parametrize("newest", [None, (9, 14, 4, 20)])
def test_what_is_kept_is_least_like_any_newer_position_of_its_document(newest):
    key, n, n_kept = torch.randn(14, 4, 8), 9, 4
    chosen = select_novel(key, n, n_kept, None if newest is None else torch.tensor(newest))
    for b in range(4):
        first = 14 - min((newest or (14,) * 4)[b], 14)
        centred = key[first:, b] - key[first:, b].mean(0)
        likeness = {
            first + i: max(float(torch.cosine_similarity(x, y, dim=0)) for y in centred[i + 1 :])
            for i, x in enumerate(centred[:-1])
            if first + i < n
        }
        kept = sorted(sorted(likeness, key=lambda i: likeness[i])[:n_kept])
        assert chosen[:, b].tolist()[n_kept - len(kept) :] == kept
        assert all(i < first for i in chosen[:, b].tolist()[: n_kept - len(kept)])


def test_what_is_kept_is_chosen_in_float32_under_autocast_too():
    newer = torch.randn(99, 1, 64)
    key = torch.cat((newer + 0.1 * torch.randn_like(newer), newer))
    with torch.autocast("cpu", torch.bfloat16):
        chosen = select_novel(key, 99, 50, None)
    assert torch.equal(chosen, select_novel(key, 99, 50, None))


@pytest.mark.parametrize("token_shift", [False, True])
def test_a_kept_position_stays_as_it_was_and_one_that_was_dropped_stays_away(token_shift):
    """With a token shift, as it was shifted when it left the newest, predecessor included."""
    sizes = {"mem_len": 5, "c_mem_len": 4, "compression_rate": 5, "token_shift": token_shift}
    lm = MemoryLM(ModelConfig(model="selective", **TINY, **sizes)).double()
    layer, memory, before = lm.transformer.memory_layers[0], None, set()
    torch.nn.init.normal_(layer.shift.w) if token_shift else None
    x = torch.randn(40, 1, 8, dtype=torch.float64)
    rows = torch.cat((x[:1], x[1:] + layer.shift.w * x[:-1])) if token_shift else x
    for i, part in enumerate(x.split(5)):
        _, memory, _ = lm.transformer(part, memory)
        distances = [(row - rows).abs().sum((1, 2)) for row in memory.layers[0].slots]
        assert all(d.min() < 1e-9 for d in distances)
        read = {int(d.argmin()) for d in distances}
        assert len(read) == (4 if i else 0)
        kept = sorted(before)[i > 1 :]
        assert read <= {*kept, *range(5 * (i - 1), 5 * i)}
        before = read


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("token_shift", [False, True])
@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [5, 1, 3, 7, 4]])
def test_until_something_is_dropped_it_computes_what_transformer_xl_does(token_shift, lengths):
    """Outputs and every gradient, where documents begin too."""
    text, doc_starts, of_both = torch.randint(7, (20, 3)), torch.rand(20, 3) < 0.1, []
    for sizes in ({"model": "selective", "mem_len": 5, "c_mem_len": 15}, {"mem_len": 20}):
        torch.manual_seed(1)
        lm = fill_zeros(MemoryLM(ModelConfig(**TINY, **sizes, token_shift=token_shift)))
        logits, *_ = read(lm, text, doc_starts, lengths=lengths)
        of_both.append([logits, *gradients(lm, logits.square().sum())])
    same(*of_both)
