"""Lengths by head and divided memory, against the definition: one head after the other."""

import pytest
import torch

from memformers import MemoryLM, MemorySizes, ModelConfig, Stepper
from memformers.common.files import config_from_dict
from memformers.evaluation.evaluate import with_lengths
from memformers.kernels import naive
from memformers.models.attention import Divided, RelativeMultiHeadAttention
from memformers.models.base import memory_facts
from memformers.models.memory import Memory
from memformers.training.loop import shortened
from tests.builders import fill_zeros
from tests.texts import gradients, same, tokens

XL, COMPRESSIVE = {"model": "transformer-xl"}, {"model": "compressive", "compression_rate": 3}
CASES = {
    "xl": XL | {"mem_len": ((3, 11, 3, 19),)},
    "xl, learned": XL | {"mem_len": (5, (0, 0, 17, 2)), "positions": "learned"},
    "far slots": COMPRESSIVE | {"mem_len": ((3, 2, 8, 8),), "c_mem_len": ((0, 0, 4, 4),)},
    "strided": COMPRESSIVE | {"mem_len": ((2, 2, 2, 5),), "c_mem_len": ((0, 0, 0, 5),),
                              "compression": "strided"},
    "slots by head": COMPRESSIVE | {"mem_len": ((3, 8, 0, 8), 6), "c_mem_len": ((0, 2, 0, 5), (0, 4, 4, 1))},
    "most-used": COMPRESSIVE | {"mem_len": ((2, 2, 2, 5),), "c_mem_len": ((0, 0, 0, 5),),
                                "compression": "most-used"},
    "divided": XL | {"mem_len": (3, 9), "divided_len": (16, 24), "segment_len": 8},
    "divided, learned": XL | {"mem_len": (0, 5), "divided_len": (8, 0), "positions": "learned"},
}  # fmt: skip
each = pytest.mark.parametrize("name", CASES)


def lm_of(name):
    sizes = {"vocab_size": 11, "d_model": 16, "heads": 4, "n_layers": 2, "d_ff": 16, "segment_len": 7}
    return fill_zeros(MemoryLM(ModelConfig(**sizes | CASES[name])))


def head_by_head(attention, x, past, norm, mask, key_start, reads=None):
    """Attention as the definitions have it: of each head, over a list of keys."""
    z, S, H, before = norm(torch.cat((past, x))), len(x), attention.heads, len(past)
    query, key, value = (attention.by_head(m(y)) for m, y in zip(
        (attention.query, attention.key, attention.value), (z[before:], z, z), strict=True))  # fmt: skip
    found = []
    for h in range(H):
        newest = before if reads is None else reads.newest if isinstance(reads, Divided) else reads[h]
        keys = list(range(max(before - newest, 0), before + S))
        known = list(keys)  # from which first seen key on each is seen
        if isinstance(reads, Divided):
            blocks = range((before - newest) % H, before - newest, H)
            keys, known = [block + h for block in blocks] + keys, [*blocks, *known]
        seen = torch.tensor(keys) <= before + torch.arange(S)[:, None]  # [S, k]
        if key_start is not None:
            seen = seen & (torch.tensor(known) >= key_start[:, None, :, None])  # [B, 1, S, k]
        own = {name: x[h : h + 1] for name, x in attention.distance_terms(len(keys)).items()}
        parts = query[:, h : h + 1], key[:, h : h + 1, keys], value[:, h : h + 1, keys]
        found.append(naive.relative_attention(*parts, **own, mask=seen))
    return attention.output(torch.cat(found, dim=1).permute(2, 0, 1, 3).flatten(2))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("bounded", [False, True])
@each
def test_heads_in_groups_equal_one_head_after_the_other(name, bounded, monkeypatch):
    """Logits, memories, reconstruction losses and every gradient; called maps too, and step by step."""
    lm = lm_of(name)
    S = lm.config.segment_len
    text = tokens(7 * S, 3)
    starts = torch.rand(7 * S, 3) < 0.05 if bounded else None

    def read():
        memory, found, loss = None, [], 0.0
        for i, part in enumerate(text.split(S)):
            output = lm(part, memory, doc_starts=None if starts is None else starts[S * i : S * i + S])
            memory, loss = output.memory, loss + output.auxiliary_loss + output.logits.square().sum()
            found += [output.logits, *memory.mem, *memory.c_mem]
        return [*found, *gradients(lm, loss)]

    grouped = read()
    stepper = Stepper(lm, 3)
    steps = [stepper.step(token, None if starts is None else starts[i]) for i, token in enumerate(text)]
    hooks = [
        map.register_forward_hook(lambda *_: None)
        for layer in lm.transformer.layers
        for map in (layer.self_attn.query, layer.self_attn.key)
    ]
    same(read(), grouped)  # by maps that are called
    for hook in hooks:
        hook.remove()
    monkeypatch.setattr(RelativeMultiHeadAttention, "forward_with_memory", head_by_head)
    wanted = read()
    same(grouped, wanted)
    same([torch.stack(steps)], [torch.cat([x for x in wanted if x.shape == (S, 3, 11)])])


def test_a_head_projects_and_caches_only_what_it_reads():
    lm = lm_of("xl").eval()
    stepper = Stepper(lm, 2)
    stepper.read(tokens(42))
    kept = {tuple(g.heads if isinstance(g.heads, list) else range(4)[g.heads]): g.key.shape[3] - 7
            for g in stepper.caches[0].groups}  # fmt: skip
    assert kept == {(0, 2): 3, (1,): 11, (3,): 19}
    facts = memory_facts(lm.config)
    assert (facts["keys"], facts["memory"]["one_layer"]) == (9, 19)


def test_lengths_by_layer_are_lengths_by_head_that_are_alike():
    alike = ModelConfig(mem_len=((8, 8, 8, 8), (3, 3, 3, 3)), n_layers=2)
    assert alike.memory_sizes == ModelConfig(mem_len=(8, 3), n_layers=2).memory_sizes
    assert MemorySizes(8, heads=((8, 0), (2, 0))).keys == 5
    mixed = ModelConfig(mem_len=(64, 64, (1, 2, 3, 4), 5))
    assert config_from_dict(ModelConfig, {"mem_len": [64, 64, [1, 2, 3, 4], 5]}, "config.json") == mixed


@pytest.mark.parametrize(
    ("given", "word"),
    [({"mem_len": ((1, 2),)}, "mem_len=1,2 is for 2 heads"), ({"mem_len": ((1, 2, 3, 4),) * 2}, "2 layers"),
     ({"mem_len": ((1, 2, 3, -4),)}, "at least 0"),
     ({"mem_len": ((5, 5, 5, 9),), "same_length": True}, "window"),
     ({"model": "compressive", "mem_len": ((1, 2, 3, 4),), "c_mem_len": ((1, 0, 0, 0),)}, "slots"),
     ({"divided_len": 6}, "heads=4 can't divide divided_len=6 equally; use a multiple"),
     ({"divided_len": (8, 8)}, "for 2 layers"),
     ({"divided_len": 8, "same_length": True}, "leave out"),
     ({"divided_len": 8, "mem_len": ((1, 2, 3, 4),)}, "leave out"),
     ({"divided_len": 8, "model": "compressive"}, "is for model='transformer-xl'")],
)  # fmt: skip
def test_lengths_that_do_not_fit_the_heads_are_refused(given, word):
    with pytest.raises(ValueError, match=word):
        ModelConfig(**given)


@pytest.mark.parametrize("sizes", [(8, 0, 12), (8, 0, 6), (8, 4, 4)])
def test_sizes_that_heads_can_not_divide_are_refused(sizes):
    mem_len, c_mem_len, divided = sizes
    with pytest.raises(ValueError, match=f"divided_by=4 up to mem_len=8, .*got divided={divided}"):
        MemorySizes(mem_len, c_mem_len, divided=divided, divided_by=4)


def test_divided_memory_grows_by_as_many_keys_as_a_plain_one():
    plain, divided = (ModelConfig(**sizes).memory_sizes for sizes in ({"mem_len": 256},
                      {"mem_len": 128, "divided_len": 512}))  # fmt: skip
    for share in (0.125, 0.5, 0.75, 1.0):
        full = (Memory((torch.zeros(own[0].mem_len, 1, 1),) * 4) for own in (plain, divided))
        found = [
            len(shortened(one, share, own).mem[0]) for one, own in zip(full, (plain, divided), strict=True)
        ]
        assert found[0] == 256 * share
        assert min(found[1], 128) + max(found[1] - 128, 0) / 4 == found[0]
    lm = with_lengths(MemoryLM(ModelConfig(mem_len=8, divided_len=8)), mem_len=0, divided_len=0)
    assert lm.config.remembered_positions == 0


def test_more_positions_than_are_stored_are_refused_for_the_longest_head():
    attention = RelativeMultiHeadAttention(2, 8, 0.0, max_positions=9)
    x = torch.randn(10, 1, 8)
    with pytest.raises(ValueError, match="max_positions=9"):
        attention(query=x[-2:], key=x, value=x, reads=(3, 8))
    for reads in ((3, 9), (3,), (-1, 3)):
        with pytest.raises(ValueError, match="of 0 to 8 keys"):
            attention(query=x[-2:], key=x, value=x, reads=reads)
    mask = torch.zeros(2, 10, 1, dtype=torch.bool)
    mask[:, 0] = True
    for reads in ((3, 8), Divided(2)):
        with pytest.raises(ValueError, match="hides every key that a head reads"):
            RelativeMultiHeadAttention(2, 8)(query=x[-2:], key=x, value=x, mask=mask, reads=reads)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("reads", [Divided(5), (2, 17, 9, 0)])
def test_attention_under_a_mask_is_its_probabilities_times_the_values(reads):
    attention, x = RelativeMultiHeadAttention(4, 16, 0.0), torch.randn(21, 3, 16)
    mask = (torch.rand(4, 21, 3) < 0.5) | (torch.arange(21) == 17 + torch.arange(4)[:, None])[..., None]
    mask &= (torch.arange(21) <= 17 + torch.arange(4)[:, None])[..., None]
    looks = attention.probabilities(query=x[17:], key=x, mask=mask, reads=reads)  # [B, H, S, K]
    context = looks @ attention.by_head(attention.value(x))
    wanted = attention.output(context.permute(2, 0, 1, 3).flatten(2))
    same([attention(query=x[17:], key=x, value=x, mask=mask, reads=reads)], [wanted])
    assert not looks[~mask.permute(2, 0, 1)[:, None].expand_as(looks)].any()
    assert (looks[:, :, :, :12] > 0).sum(1).amax() == 1 or reads != Divided(5)  # read by one head
