"""Layers that remember unequally much: each as if its lengths were those of all."""

from dataclasses import asdict, replace

import pytest
import torch

from memformers import CompressiveTransformer, CompressiveTransformerLayer, Conv1dCompression
from memformers.commands.train import Train, parse_train
from memformers.comparison.arms import arms_of_models, read_arms, settings_of
from memformers.comparison.text import TEXT
from memformers.evaluation.attention_mass import attention_mass
from memformers.evaluation.evaluate import with_lengths
from memformers.generation.decoding import Decoder
from memformers.generation.generate import side_by_side
from memformers.generation.memory_file import load_memory, save_memory
from memformers.kernels import naive
from memformers.models.boundaries import newest_start
from memformers.models.config import attention_operations, memory_facts
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory, memory_from_tensors, memory_tensors
from tests.builders import SMALL, layer_parts, small_lm, small_training
from tests.texts import EXACT, documents, kept, read, read_on, same, tokens

pytestmark = pytest.mark.usefixtures("float64")

LENGTHS = {"n_layers": 3, "mem_len": (2, 9, 0), "c_mem_len": (5, 0, 3), "compression_rate": (3, 2, 4)}
CASES = [("transformer-xl", LENGTHS), ("compressive", LENGTHS),
         ("compressive", LENGTHS | {"compression": "most-used"})]  # fmt: skip
SPANS = {"n_layers": 2, "mem_len": (2, 9), "same_length": True}
STARTS = documents(60, 2, (9, 0), (24, 1), (25, 0), (40, 0))


def by_hand(lm, text, doc_starts):
    """The logits of a text, where each layer's whole past is known with the positions it stands for, and what
    it remembers of that is written down anew for each segment, with its own lengths, by the naive kernel."""
    config, S, B = lm.config, lm.config.segment_len, text.shape[1]
    document = torch.zeros_like(text) if doc_starts is None else newest_start(doc_starts) + 1
    pasts, slots, logits = [[] for _ in config.layer_lengths], [[] for _ in config.layer_lengths], []
    for begin in range(0, len(text), S):
        x, here = lm.embed(text[begin : begin + S]), range(begin, min(begin + S, len(text)))
        for layer, own, past, made in zip(
            lm.transformer.layers, config.layer_lengths, pasts, slots, strict=True
        ):
            kept = made[len(made) - min(own.c_mem_len, len(made)) :]
            keys = [*kept, *past, *(([t], z) for t, z in zip(here, x, strict=True))]
            context = layer.attention_input(torch.stack([z for _, z in keys]))
            mask = torch.zeros(len(here), len(keys), B, dtype=torch.bool)
            for i, t in enumerate(here):
                for j, (positions, _) in enumerate(keys):
                    same = (document[positions] == document[t]).all(0)
                    mask[i, j] = same & (max(positions) <= t)
            past += [([t], z.detach()) for t, z in zip(here, x, strict=True)]
            attention = layer.self_attn
            by_head = [
                attention.by_head(m(context)) for m in (attention.query, attention.key, attention.value)
            ]
            looked = naive.relative_attention(
                by_head[0][:, :, -len(here) :], *by_head[1:], **attention.distance_terms(len(keys)),
                mask=mask.permute(2, 0, 1)[:, None],
            )  # fmt: skip
            looked = attention.output(looked.permute(2, 0, 1, 3).flatten(2))
            x = layer.transform(x, lambda z, looked=looked: looked)
            c = own.compression_rate if config.model == "compressive" else 1
            while len(past) > own.mem_len and len(past) >= c:
                oldest, past[:] = past[:c], past[c:]
                if config.model == "compressive":
                    slot = layer.compress(torch.stack([z for _, z in oldest]))[0].detach()
                    made.append(([t for positions, _ in oldest for t in positions], slot))
        logits.append(lm.predict(lm.transformer.norm(x)))
    return torch.cat(logits)


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("bounded", [False, True])
@torch.no_grad()
def test_each_layer_remembers_what_its_own_lengths_say(model, positions, bounded):
    """Slots of several rates, a layer without memory and one without slots, with documents and without."""
    lm, text = small_lm(model, positions=positions, **LENGTHS).eval(), tokens(60)
    doc_starts = STARTS if bounded else None
    torch.testing.assert_close(read(lm, text, doc_starts)[0], by_hand(lm, text, doc_starts), **EXACT)


@pytest.mark.parametrize(("model", "settings"), [*CASES, ("transformer-xl", SPANS)])
@pytest.mark.parametrize("bounded", [False, True])
def test_a_decoder_writes_what_one_pass_reads(model, settings, bounded):
    lm, text = small_lm(model, **settings).eval(), tokens(60)
    doc_starts = STARTS if bounded else None
    logits, _, memory = read(lm, text[:56], None if doc_starts is None else doc_starts[:56])
    decoder = Decoder(lm, 2)
    last = read_on(decoder, text[:56], None if doc_starts is None else doc_starts[:56], portion=3)[-1]
    taken_up = Decoder(lm, 2, memory).read(text[56:])
    wanted = lm(text[56:], memory).logits[-1]
    same([last, *kept(decoder.memory()), taken_up], [logits[-1], *kept(memory), wanted])


@pytest.mark.parametrize(("model", "settings"), CASES)
def test_a_document_at_the_edge_of_every_layers_slots_is_read_as_in_a_fresh_stream(model, settings):
    lm, text = small_lm(model, **settings).eval(), tokens(80)
    doc_starts = documents(80, 2, (24, 0), (24, 1))  # 12 positions fill whole slots of 2, 3 and 4
    found, losses, _ = read(lm, text, doc_starts)
    fresh, fresh_losses, _ = read(lm, text[24:], begin=24 % 7)
    same([found[24:], *losses[4:]], [fresh, *fresh_losses[1:]])


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_an_empty_memory_of_full_length_is_as_none(model):
    lm, text = small_lm(model, **LENGTHS), tokens(60)
    memory = Memory.empty(lm.config, 2)
    assert [len(mem) for mem in memory.mem] == ([2, 9, 0] if model == "transformer-xl" else [0, 8, 0])
    torch.testing.assert_close(read(lm, text, memory=memory)[0], read(lm, text)[0], **EXACT)


def test_layers_learn_from_their_own_compressions_in_segments_where_others_compress_nothing():
    lm = small_lm("compressive", segment_len=4, **(LENGTHS | {"mem_len": (0, 8, 3)}))
    seen, memory = [], None
    for text in tokens(24).split(4):
        _, memory, loss = lm(text, memory)
        learning = [list(layer.compress.parameters()) for layer in lm.transformer.layers]
        grads = [torch.autograd.grad(loss, ps, allow_unused=True, retain_graph=True) for ps in learning]
        seen.append([grad[0] is not None and bool(grad[0].any()) for grad in grads])
    assert [True, False, True] in seen
    assert [True, True, True] in seen


def test_stacks_take_a_layer_each():
    layers = [
        CompressiveTransformerLayer(**layer_parts(), compress=Conv1dCompression(rate, 12)) for rate in (2, 5)
    ]
    assert CompressiveTransformer(layers, 2).compression_rates == [2, 5]
    with pytest.raises(ValueError, match=r"n_layers=3 layers, .* got 2"):
        CompressiveTransformer(layers, 3)


@pytest.mark.parametrize(("model", "settings"), [*CASES[:2], ("compressive", LENGTHS | {"bptt": 2})])
def test_models_and_memories_are_saved_and_taken_up_again(model, settings, tmp_path):
    lm, text = small_lm(model, **settings).eval(), tokens(40, 1)
    lm.save_pretrained(tmp_path)
    loaded = MemoryLM.from_pretrained(tmp_path)
    assert loaded.config == lm.config
    reader = Decoder(lm, 1)
    reader.read(text)
    save_memory(reader, tmp_path / "memory.safetensors")
    again, more = load_memory(loaded, tmp_path / "memory.safetensors"), tokens(20, 1)
    torch.testing.assert_close(again.read(more), reader.read(more), **EXACT)
    memory = reader.memory()
    again = memory_from_tensors(memory_tensors(memory), 3)
    assert all(map(torch.equal, kept(again), kept(memory)))
    loaded.check_memory(again, 1)


def test_what_is_measured_of_a_model_knows_each_layers_lengths():
    config = replace(SMALL, model="compressive", **LENGTHS)
    assert config.positions_of_layers == [2 + 15, 9, 12]
    assert config.remembered_positions == 17
    assert config.longest_attention == 7 + 9  # the second layer's
    facts = memory_facts(config)
    assert facts["memory"] == {"one_layer": 17, "all_layers": 38}
    assert facts["keys"] == pytest.approx((7 + 9 + 3) / 3)
    layers = [
        replace(config, n_layers=1, mem_len=own.mem_len, c_mem_len=own.c_mem_len, compression_rate=2)
        for own in config.layer_lengths
    ]
    assert attention_operations(config) == sum(map(attention_operations, layers))
    prompts = side_by_side([torch.ones(85, dtype=torch.int64), torch.ones(3, dtype=torch.int64)], config)
    assert prompts.ends == (85, 3)  # a shift by whole segments and whole slots would be one of 84
    lm, text = small_lm("compressive", **LENGTHS), tokens(200, 1).flatten()
    mass = attention_mass(lm, text, streams=2, segments=2)
    for layer, of_layer in enumerate(mass.by_place):
        for head in of_layer:
            assert sum(head) == pytest.approx(1)
            assert bool(head[0]) == bool(lm.config.layer_lengths[layer].c_mem_len)


def test_arms_and_lengths_are_given_layer_by_layer():
    options = "--model compressive --n-layers 4 --mem-len 32 32 128 128 --compression-rate 2"
    config = parse_train(options.split(), Train()).config.model
    assert (config.mem_len, config.c_mem_len, config.compression_rate) == ((32, 32, 128, 128), 64, 2)
    train = small_training()
    train = replace(train, model=replace(train.model, mem_len=(8, 16), c_mem_len=4))
    (equal_keys,) = arms_of_models(["transformer-xl"], train.model, equal_keys=True)
    (given,) = read_arms(["low: model=transformer-xl mem_len=[4,16]"], asdict(train))
    for arm, lengths in ((equal_keys, (12, 20)), (given, (4, 16))):
        assert TEXT.parse(settings_of(arm, asdict(train)), arm.name).model.mem_len == lengths
    model = with_lengths(small_lm("transformer-xl"), mem_len=(1, 3))
    assert model.config.layer_lengths[1].mem_len == 3


def test_memories_and_positions_that_do_not_fit_are_an_error():
    one, text = torch.zeros(3, 2, 12), tokens(7)
    unequal = Memory((one, torch.zeros(4, 2, 12)))
    lm, by_layer, half = (
        small_lm("transformer-xl", mem_len=own, positions="learned") for own in (5, (5, 3), (5, 0))
    )
    by_layer(text, unequal)
    for call, message in (
        (lambda: lm(text, unequal), "mem has 3 positions in layer 0 and 4 in layer 1"),
        (lambda: lm(text, Memory((one, torch.tensor(3.0)))), r"mem of layer 1 as \[length, .* got \[\]"),
        (lambda: Decoder(by_layer, 2, unequal), "a memory of 4 positions in layer 1 .* keeps 3"),
        (lambda: half(text, unequal), "a memory of 4 positions in layer 1 .* keeps 0"),
        (lambda: with_lengths(by_layer, mem_len=(2, 6)), r"at most 12 positions.* 13"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
