"""Memory that grows during a training."""

from dataclasses import replace

import pytest
import torch

from memformers.models.memory import Memory
from memformers.training.memory_growth import STAGES, share_of_memory, shortened
from tests.builders import small_lm, small_training
from tests.training.runs import train_here


def counting(*lengths):
    """For each of ``lengths``, a tensor ``[length, 1, 1]`` that counts its positions."""
    return tuple(torch.arange(float(length)).view(-1, 1, 1) for length in lengths)


def test_the_share_grows_in_stages_from_nothing_to_everything():
    config = small_training(tokens=8_000, memory_warmup=0.5)
    shares = [share_of_memory(tokens, config) for tokens in range(0, 8_000, 250)]
    assert shares[0] == 0
    assert shares[:16] == [stage / STAGES for stage in range(STAGES) for _ in range(2)]
    assert shares[16:] == [1.0] * 16
    assert share_of_memory(0, small_training()) == 1.0


def test_a_share_of_a_memory_is_its_newest_positions_then_its_newest_slots():
    lm = small_lm("compressive", segment_len=8, mem_len=8, c_mem_len=8, compression_rate=4, bptt=1)
    layers = lm.config.memory_sizes
    memory = Memory(counting(8, 8), counting(8, 8), None, counting(8, 8))
    kept = {}
    for share in (0, 3 / 8, 7 / 16, 1 / 2, 5 / 8, 1):
        part = shortened(memory, share, layers)
        for whole, cut in zip(memory.mem + memory.c_mem, part.mem + part.c_mem, strict=True):
            assert torch.equal(cut, whole[len(whole) - len(cut) :])
        kept[share] = (part.mem_len, part.c_mem_len, len(part.slot_inputs[0]))
    assert kept == {
        0: (0, 0, 0),
        3 / 8: (4, 0, 0),
        7 / 16: (4, 0, 0),
        1 / 2: (8, 0, 0),
        5 / 8: (8, 2, 8),
        1: (8, 8, 8),
    }
    assert shortened(memory, 1.0, layers) is memory
    assert shortened(Memory(()), 0.5, layers) == Memory(())


def test_each_layer_has_its_share_of_its_own_length():
    layers = small_lm("transformer-xl", n_layers=2, mem_len=(4, 16)).config.memory_sizes
    part = shortened(Memory(counting(4, 16)), 0.5, layers)
    assert part.lengths(2) == [(2, 0), (8, 0)]


@pytest.mark.parametrize(("model", "longest"), [("transformer-xl", (16, 0)), ("compressive", (8, 8))])
def test_a_training_begins_without_memory_and_ends_with_all_of_it(model, longest):
    M, C = longest
    lm = small_lm(model, segment_len=16, mem_len=M, c_mem_len=C or 8, compression_rate=2)
    config, seen = small_training(batch_size=1, tokens=14 * 16, memory_warmup=0.5), []
    lm.register_forward_pre_hook(lambda _, args: seen.append((args[1].mem_len, args[1].c_mem_len)))
    train_here(lm, config)
    keys = [mem + c_mem for mem, c_mem in seen]
    assert keys[0] == 0
    assert keys == sorted(keys)
    assert 0 < keys[2] < keys[5] < M + C
    assert seen[8:] == [(M, C)] * 6


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("share", [3 / 8, 6 / 8])
def test_a_shortened_memory_still_hides_the_documents_before(share):
    """What a stream's ended document left in it can be anything."""
    lm = small_lm("compressive", segment_len=8, mem_len=8, c_mem_len=8, compression_rate=2)
    tokens, memory = torch.randint(11, (4, 8, 3)), None
    doc_starts = torch.zeros(4, 8, 3, dtype=torch.bool)
    doc_starts[2, 4, 1] = doc_starts[3, 2, 2] = True
    for segment, begun in zip(tokens, doc_starts, strict=True):
        memory = lm(segment, memory, doc_starts=begun).memory
    short = shortened(memory, share, lm.config.memory_sizes)
    known = (short.valid, [x.clone() for x in (*short.mem, *short.c_mem)])
    for x in short.mem:
        x[: max(len(x) - 6, 0), 2] = 7.0  # the third stream's document has 6 positions yet
    for x in short.c_mem:
        x[:, 2] = 7.0
    changed = lm(tokens[0], short).logits
    before = replace(short, mem=tuple(known[1][:2]), c_mem=tuple(known[1][2:]))
    assert known[0].tolist()[2] == 6
    assert torch.equal(changed, lm(tokens[0], before).logits)
