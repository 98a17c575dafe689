"""Memories that choose positions keep those that their papers' equations choose."""

import pytest
import torch

from experiments.memories.keydiff import KeyDiff
from experiments.memories.learned_eviction import LearnedEviction
from experiments.memories.random_positions import RandomPositions
from experiments.memories.rkv import RKV
from experiments.memories.tova import TOVA
from memformers import LayerMemory, MemoryLM, MemorySizes, ModelConfig, UpdateContext
from tests.experiments.networks import TINY


def read_segments(rule, x, segment_len, starts=None):
    """What ``rule`` remembers of the inputs ``x [T, B, D]``, in whole segments, where the second document of
    each stream ``starts``, at the edge of a segment."""
    past = LayerMemory.nothing(x)
    for begin in range(0, len(x), segment_len):
        segment = x[begin : begin + segment_len]
        end = begin + len(segment)
        n_valid = None if starts is None else torch.tensor([end - start * (end > start) for start in starts])
        past, _ = rule.update(past, segment, UpdateContext(None, segment, n_valid))
    return past


def test_random_positions_have_the_highest_priority():
    M, C, c, S, T = 8, 6, 4, 4, 200
    rule = RandomPositions(MemorySizes(M, C, c, slot_positions=1), RandomPositions.Config())
    x = torch.arange(1.0, T + 1)[:, None, None]  # inputs are their own numbers
    past = read_segments(rule, x, S)
    priority = rule.priority(torch.arange(T + 1)).tolist()
    kept = []
    for end in range(S, T + 1, S):
        leaving = range(max(end - M - S, 0) + 1, max(end - M, 0) + 1)
        n_expired = max(-(-len(leaving) // c) - (C - len(kept)), 0)
        candidates = [*kept[n_expired:], *leaving]
        kept = sorted(sorted(candidates, key=lambda number: -priority[number])[:C])
    assert past.slots[:, 0, 0].tolist() == kept == past.state["kept"][:, 0].tolist()
    assert past.mem[:, 0, 0].tolist() == [*range(T - M + 1, T + 1)]
    assert past.state["newest"].item() == T


def test_random_priorities_are_uniform_and_independent():
    number = torch.arange(100_000)
    config = ModelConfig(model=RandomPositions, memory_config={"hash_seed": 1}, **TINY, c_mem_len=2)
    rules = [
        *RandomPositions.build(config),
        RandomPositions(config.memory_sizes[0], RandomPositions.Config()),
    ]
    drawn = torch.stack([rule.priority(number) for rule in rules])
    assert drawn.min() >= 0
    assert drawn.max() <= 1
    counts = torch.stack([(10 * row).long().bincount() for row in drawn])
    assert (counts - 10_000).abs().max() < 500  # five standard deviations
    shifted = torch.cat((drawn, drawn.roll(1, 1)))
    correlation = shifted.corrcoef() - torch.eye(len(shifted))
    assert correlation.abs().max() < 0.02


def test_random_positions_start_over_with_a_document():
    rule = RandomPositions(MemorySizes(8, 6, 4, slot_positions=1), RandomPositions.Config())
    x = torch.randn(80, 2, 3)
    with_older_stream = read_segments(rule, x, 4, starts=(0, 40))
    fresh = read_segments(rule, x[40:, 1:], 4)
    assert torch.equal(with_older_stream.slots[:, 1:], fresh.slots)
    assert torch.equal(with_older_stream.slots[:, :1], read_segments(rule, x[:, :1], 4).slots)


@pytest.mark.parametrize("n_valid", [None, 11, 7])
def test_keydiff_keeps_keys_unlike_the_mean(n_valid):
    M, C = 4, 5
    lm = MemoryLM(ModelConfig(model=KeyDiff, mem_len=M, c_mem_len=C, **TINY)).double()
    rule = lm.transformer.memory_rules[0]
    layer = lm.transformer.memory_layers[0]
    older = torch.randn(C + M, 1, 8).double()
    x = torch.randn(5, 1, 8).double()
    lengths = None if n_valid is None else torch.tensor([n_valid])
    updated, _ = rule.update(LayerMemory(older[C:], older[:C]), x, UpdateContext(layer, x, lengths))

    every = torch.cat((older, x))[:, 0]
    in_document = [*range(len(every))] if n_valid is None else [*range(len(every) - n_valid, len(every))]
    # The newest M stay anyway.
    in_document = [i for i in in_document if i < len(every) - M]
    total = dict.fromkeys(in_document, 0.0)
    for head in range(2):
        keys = {}
        for i in in_document:
            keys[i] = layer.self_attn.key(layer.norm_self_attn(every[i])).view(2, 4)[head]
        anchor = sum(key / key.norm() for key in keys.values()) / len(keys)
        for i, key in keys.items():
            total[i] += (anchor @ key / (anchor.norm() * key.norm())).item()
    kept = sorted(sorted(in_document, key=lambda i: total[i])[:C])
    assert len(kept) == min(C, len(in_document))
    assert torch.equal(updated.slots[C - len(kept) :, 0], every[kept])
    assert torch.equal(updated.mem[:, 0], every[-M:])


def test_keydiff_ignores_earlier_documents():
    """Not even if it isn't finite."""
    lm = MemoryLM(ModelConfig(model=KeyDiff, mem_len=4, c_mem_len=5, **TINY))
    rule = lm.transformer.memory_rules[0]
    x = torch.randn(8, 1, 8)
    left = torch.full((4, 1, 8), torch.nan)
    context = UpdateContext(lm.transformer.memory_layers[0], x, torch.tensor([8]))
    updated, _ = rule.update(LayerMemory(left, left), x, context)
    assert torch.equal(updated.slots[1:], x[:4])


@torch.no_grad()
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_tova_keeps_the_most_attended_positions(positions):
    M, C = 4, 3
    config = ModelConfig(model=TOVA, mem_len=M, c_mem_len=C, positions=positions, **TINY)
    lm = MemoryLM(config).double().eval()
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter)
    layer = lm.transformer.memory_layers[0]
    memory = None
    for text in torch.randint(7, (6, 5, 1)):
        past = LayerMemory.nothing(lm.embed(text)) if memory is None else memory.layers[0]
        every = torch.cat((past.slots, past.mem, lm.embed(text)))[:, 0]
        memory = lm(text, memory).memory
        K = len(every)
        z = layer.norm_self_attn(every)
        attention = layer.self_attn
        terms = attention.distance_terms(K)
        score = torch.zeros(K).double()
        for head in range(2):
            q = attention.query(z[-1]).view(2, 4)[head]
            logits = torch.empty(K).double()
            for j in range(K):
                k = attention.key(z[j]).view(2, 4)[head]
                d = K - 1 - j
                logits[j] = (q + terms["u"][head]) @ k + q @ terms["r"][head, d]
                if positions == "learned":
                    logits[j] += terms["s"][head, d]
                else:
                    logits[j] += terms["v"][head] @ terms["r"][head, d]
            score += (logits / 2).softmax(0)
        kept = score[: K - M].topk(min(C, K - M)).indices.sort().values
        assert torch.equal(memory.layers[0].slots[:, 0], every[kept])


@torch.no_grad()
def test_tova_keeps_the_document_without_attention():
    lm = MemoryLM(ModelConfig(model=TOVA, mem_len=4, c_mem_len=5, **TINY)).eval()
    layer = lm.transformer.memory_layers[0]
    layer.self_attn.query.weight.copy_(1e4 * layer.self_attn.key.weight)
    x = torch.randn(1, 1, 8) * torch.tensor([-4.0, -3.0, -2.0, -1.0, 1.0, 2.0, 3.0, 4.0])[:, None, None]
    left = torch.full((4, 1, 8), 7.0)  # of an earlier document
    updated, _ = lm.transformer.memory_rules[0].update(
        LayerMemory(left, left), x, UpdateContext(layer, x, torch.tensor([8]))
    )
    assert torch.equal(updated.slots[1:], x[:4])


@torch.no_grad()
@pytest.mark.parametrize("n_valid", [None, 17, 12])
def test_rkv_keeps_attended_positions_that_are_not_redundant(n_valid):
    M, C, S = 4, 7, 9
    settings = TINY | {"segment_len": S}
    config = ModelConfig(
        model=RKV, mem_len=M, c_mem_len=C, memory_config={"importance_share": 0.4}, **settings
    )
    lm = MemoryLM(config).double().eval()
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter)
    rule = lm.transformer.memory_rules[0]
    layer = lm.transformer.memory_layers[0]
    attention = layer.self_attn
    every = torch.randn(C + M + S, 1, 8).double()
    every[3] = every[9]  # a copy
    every[5] = 1.01 * every[10]
    x = every[C + M :]
    lengths = None if n_valid is None else torch.tensor([n_valid])
    past = LayerMemory(every[C : C + M], every[:C])
    updated, _ = rule.update(past, x, UpdateContext(layer, x, lengths))

    K = len(every)
    first = 0 if n_valid is None else K - n_valid
    members = [*range(first, K - M)]
    z = layer.norm_self_attn(every[:, 0])
    terms = attention.distance_terms(K)
    score = dict.fromkeys(members, 0.0)
    for head in range(2):
        k = attention.key(z).view(K, 2, 4)[:, head]
        # The newest eight queries, each among the positions to choose from alone.
        attended = dict.fromkeys(members, 0.0)
        for i in range(K - 8, K):
            q = attention.query(z[i]).view(2, 4)[head]
            exps = {}
            for j in members:
                if j <= i:
                    r = terms["r"][head, i - j]
                    logit = (q + terms["u"][head]) @ k[j] + (q + terms["v"][head]) @ r
                    exps[j] = (logit / 2).exp()
            for j, exp in exps.items():
                attended[j] += exp / sum(exps.values()) / 8
        # What is redundant.
        similar = dict.fromkeys(members, 0.0)
        for i in members:
            cosines = {}
            for j in members:
                if j != i:
                    cosines[j] = (k[i] @ k[j] / (k[i].norm() * k[j].norm())).item()
            alike = [j for j, cosine in cosines.items() if cosine > 0.5]
            if alike:
                cosines[max(alike)] = 0.0
            for j, cosine in cosines.items():
                similar[j] += cosine / len(members)
        total = sum(torch.tensor(r).exp() for r in similar.values())
        for j in members:
            neighbors = [attended.get(neighbor, 0.0) for neighbor in range(j - 3, j + 4)]
            score[j] += 0.4 * max(neighbors) - 0.6 * torch.tensor(similar[j]).exp() / total
    kept = sorted(sorted(members, key=lambda j: -score[j])[:C])
    assert torch.equal(updated.slots[C - len(kept) :, 0], every[kept][:, 0])
    assert torch.equal(updated.mem, every[-M:])


def test_rkv_keeps_the_newest_of_copies():
    settings = {"mem_len": 0, "c_mem_len": 1, "memory_config": {"importance_share": 0.0}}
    lm = MemoryLM(ModelConfig(model=RKV, **settings, **TINY))
    # These inputs have the same direction, and are not equal.
    x = torch.randn(1, 1, 8) * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None]
    context = UpdateContext(lm.transformer.memory_layers[0], x, None)
    updated, _ = lm.transformer.memory_rules[0].update(LayerMemory.nothing(x), x, context)
    assert torch.equal(updated.slots, x[3:])


@torch.no_grad()
def test_keep_scores_weigh_attention_and_evict():
    M, C = 4, 3
    config = ModelConfig(model=LearnedEviction, mem_len=M, c_mem_len=C, **TINY)
    lm = MemoryLM(config).double().eval()
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter)
    layer = lm.transformer.memory_layers[0]
    attention = layer.self_attn
    past = LayerMemory(torch.randn(M, 1, 8).double(), torch.randn(C, 1, 8).double())
    x = torch.randn(5, 1, 8).double()
    every = torch.cat((past.slots, past.mem, x))[:, 0]
    z = layer.norm_self_attn(every)
    keep = (z @ layer.keep.weight[0] + layer.keep.bias).sigmoid()

    K = len(every)
    terms = attention.distance_terms(K)
    wanted = []
    for i in range(C + M, K):
        by_head = []
        for head in range(2):
            q = attention.query(z[i]).view(2, 4)[head]
            logits = torch.empty(i + 1).double()
            for j in range(i + 1):
                k = attention.key(z[j]).view(2, 4)[head]
                r = terms["r"][head, i - j]
                logits[j] = ((q + terms["u"][head]) @ k + (q + terms["v"][head]) @ r) / 2
                if j < C:
                    logits[j] += keep[j].log()
            values = attention.value(z[: i + 1]).view(-1, 2, 4)[:, head]
            by_head.append(logits.softmax(0) @ values)
        wanted.append(attention.output(torch.cat(by_head)))
    torch.testing.assert_close(layer.attend(x, x, past, None, None)[:, 0], torch.stack(wanted))

    updated, _ = lm.transformer.memory_rules[0].update(past, x, UpdateContext(layer, x, None))
    kept = keep[: K - M].topk(C).indices.sort().values
    assert torch.equal(updated.slots[:, 0], every[kept])


def test_keep_scores_start_equal_and_learn():
    lm = MemoryLM(ModelConfig(model=LearnedEviction, mem_len=4, c_mem_len=3, **TINY))
    memory = None
    for text in torch.randint(7, (3, 5, 2)):
        output = lm(text, memory)
        memory = output.memory
    output.logits.square().mean().backward()
    for layer in lm.transformer.memory_layers:
        assert not layer.keep.weight.any()
        assert layer.keep.weight.grad.any()
        assert layer.keep.bias.grad.any()


def test_learned_eviction_refuses_dropout():
    with pytest.raises(ValueError, match="dropout=0"):
        MemoryLM(ModelConfig(model=LearnedEviction, dropout=0.1, **TINY))
