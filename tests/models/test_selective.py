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
def test_what_is_kept_is_least_like_any_newer_position(newest):
    """Of its document; if that has too few, older positions fill up."""
    T = 14
    n = 9  # to choose from
    n_kept = 4
    key = torch.randn(T, 4, 8)
    chosen = select_novel(key, n, n_kept, None if newest is None else torch.tensor(newest))
    for b in range(4):
        first = T - min(newest[b], T) if newest else 0
        centred = key[:, b] - key[first:, b].mean(0)
        similarity = {}
        for i in range(first, n):
            to_newer = [torch.cosine_similarity(centred[i], centred[j], dim=0) for j in range(i + 1, T)]
            similarity[i] = max(float(x) for x in to_newer)
        kept = sorted(sorted(similarity, key=similarity.__getitem__)[:n_kept])
        n_filled = n_kept - len(kept)
        assert chosen[n_filled:, b].tolist() == kept
        assert all(i < first for i in chosen[:n_filled, b].tolist())


def test_what_is_kept_is_chosen_in_float32_under_autocast_too():
    newer = torch.randn(99, 1, 64)
    key = torch.cat((newer + 0.1 * torch.randn_like(newer), newer))
    with torch.autocast("cpu", torch.bfloat16):
        chosen = select_novel(key, 99, 50, None)
    assert torch.equal(chosen, select_novel(key, 99, 50, None))


@pytest.mark.parametrize("token_shift", [False, True])
def test_a_kept_position_stays_and_a_dropped_one_stays_away(token_shift):
    """With a token shift, as it was shifted when it left the newest, predecessor included."""
    sizes = {"mem_len": 5, "c_mem_len": 4, "compression_rate": 5, "token_shift": token_shift}
    lm = MemoryLM(ModelConfig(model="selective", **TINY, **sizes)).double()
    layer = lm.transformer.memory_layers[0]
    x = torch.randn(40, 1, 8, dtype=torch.float64)
    rows = x
    if token_shift:
        torch.nn.init.normal_(layer.shift.w)
        rows = torch.cat((x[:1], x[1:] + layer.shift.w * x[:-1]))
    memory = None
    past_numbers = []
    for i, part in enumerate(x.split(5)):
        _, memory, _ = lm.transformer(part, memory)
        # The number of each kept position.
        numbers = set()
        for slot in memory.layers[0].slots:
            distances = (slot - rows).abs().sum((1, 2))
            assert distances.min() < 1e-9
            numbers.add(int(distances.argmin()))
        assert len(numbers) == (4 if i else 0)
        # For five positions that leave the newest, the oldest kept one expires.
        unexpired = past_numbers[1:] if i > 1 else past_numbers
        leaving = range(5 * (i - 1), 5 * i)
        assert numbers <= {*unexpired, *leaving}
        past_numbers = sorted(numbers)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("token_shift", [False, True])
@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [5, 1, 3, 7, 4]])
def test_until_something_is_dropped_it_is_transformer_xl(token_shift, lengths):
    """Outputs and every gradient, where documents begin too."""
    text = torch.randint(7, (20, 3))
    doc_starts = torch.rand(20, 3) < 0.1

    def compute(**settings):
        torch.manual_seed(1)
        lm = fill_zeros(MemoryLM(ModelConfig(**TINY, **settings, token_shift=token_shift)))
        logits, *_ = read(lm, text, doc_starts, lengths=lengths)
        return [logits, *gradients(lm, logits.square().sum())]

    same(compute(model="selective", mem_len=5, c_mem_len=15), compute(mem_len=20))
