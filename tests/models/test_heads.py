"""Lengths by head, against the definition: one kernel for all heads, with a mask for each."""

import pytest
import torch

from memformers import MemoryLM, MemorySizes, ModelConfig, Stepper
from memformers.common.files import config_from_dict
from memformers.kernels import naive
from memformers.models.attention import RelativeMultiHeadAttention, seen_by_heads
from memformers.models.base import memory_facts
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
}  # fmt: skip
each = pytest.mark.parametrize("name", CASES)


def lm_of(name):
    sizes = {"vocab_size": 11, "d_model": 16, "heads": 4, "n_layers": 2, "d_ff": 16, "segment_len": 7}
    return fill_zeros(MemoryLM(ModelConfig(**sizes, **CASES[name])))


def masked(attention, query, project, K, mask, key_start, reads):
    """Attention as the definition has it, of all heads to all keys."""
    query, (key, value) = attention.by_head(query), project(slice(0, attention.heads), K)
    S = query.shape[2]
    seen = seen_by_heads(reads or [K - S] * attention.heads, S, K, query.device)
    terms = attention.distance_terms(K)
    context = naive.relative_attention(query, key, value, **terms, mask=seen, key_start=key_start)
    return attention.output(context.permute(2, 0, 1, 3).flatten(2))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("bounded", [False, True])
@each
def test_heads_in_groups_equal_one_kernel_with_a_mask_by_head(name, bounded, monkeypatch):
    """Logits, memories, reconstruction losses and every gradient; called maps too, and step by step."""
    lm, text = lm_of(name), tokens(35, 3)
    starts = torch.rand(35, 3) < 0.08 if bounded else None

    def read():
        memory, found, loss = None, [], 0.0
        for i, part in enumerate(text.split(7)):
            output = lm(part, memory, doc_starts=None if starts is None else starts[7 * i : 7 * i + 7])
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
    monkeypatch.setattr(RelativeMultiHeadAttention, "attend", masked)
    wanted = read()
    same(grouped, wanted)
    same([torch.stack(steps)], [torch.cat([x for x in wanted if x.shape == (7, 3, 11)])])


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
     ({"model": "compressive", "mem_len": ((1, 2, 3, 4),), "c_mem_len": ((1, 0, 0, 0),)}, "slots")],
)  # fmt: skip
def test_lengths_that_do_not_fit_the_heads_are_refused(given, word):
    with pytest.raises(ValueError, match=word):
        ModelConfig(**given)


def test_more_positions_than_are_stored_are_refused_for_the_longest_head():
    attention = RelativeMultiHeadAttention(2, 8, 0.0, max_positions=9)
    x = torch.randn(10, 1, 8)
    with pytest.raises(ValueError, match="max_positions=9"):
        attention(query=x[-2:], key=x, value=x, reads=(3, 8))
    for reads in ((3, 9), (3,), (-1, 3)):
        with pytest.raises(ValueError, match="of 0 to 8 keys"):
            attention(query=x[-2:], key=x, value=x, reads=reads)
