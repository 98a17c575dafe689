"""Every memory satisfies what all memories must, and what tables say of it is true. Those of papers compute
what the papers' equations say."""

import pytest
import torch
from torch.nn.functional import elu, softplus

from experiments.memories import ALL_MEMORIES, FOLDER, ROOT
from experiments.memories.gated_delta import GatedDelta
from experiments.memories.infini import InfiniAttention, matrix_of
from experiments.memories.keydiff import KeyDiff
from experiments.memories.learned_eviction import LearnedEviction
from experiments.memories.memory_tokens import MemoryTokens
from experiments.memories.pooled_slots import PooledSlots, SoftmaxPooling
from experiments.memories.random_positions import RandomPositions
from experiments.memories.rkv import RKV
from experiments.memories.tova import TOVA
from memformers import LayerMemory, MemoryLM, MemorySizes, ModelConfig, UpdateContext, assert_conforms
from memformers.models.facts import BYTES, memory_facts
from memformers.models.rules import BUILT_IN

TINY = {"vocab_size": 7, "d_model": 8, "n_heads": 2, "n_layers": 2, "d_ff": 8, "segment_len": 5}
every_memory = pytest.mark.parametrize("memory", ALL_MEMORIES, ids=lambda memory: memory.name)


@every_memory
def test_every_memory_conforms(memory):
    assert_conforms(memory.import_path)


@every_memory
def test_the_keys_and_bytes_of_a_table_are_those_of_a_full_memory(memory):
    config = ModelConfig(model=memory.import_path, d_model=12, n_heads=3, n_layers=5, segment_len=8,
                         mem_len=16,                         c_mem_len=6, compression_rate=4)  # fmt: skip
    letters = {"n": 5, "D": 12, "E": 4, "M": 16, "C": 6, "S": 8}
    if "m" in memory.keys:
        letters["m"] = config.memory_config.tokens_of_memory
    facts = memory_facts(config)
    assert facts["keys"] == eval(memory.keys, letters)
    assert facts["state_bytes"] == BYTES * eval(memory.state, letters)


def test_the_list_has_every_memory_of_the_package_and_of_the_folder():
    files = {f"{FOLDER}/{path.name}" for path in (ROOT / FOLDER).glob("*.py") if "__" not in path.name}
    models = [memory.model for memory in ALL_MEMORIES]
    assert {model.rpartition(":")[0] for model in models if ":" in model} == files
    assert [model for model in models if ":" not in model] == [*BUILT_IN]


@pytest.mark.parametrize("n_written", [3, 2])
def test_the_delta_rule_writes_only_what_the_matrix_does_not_hold(n_written):
    """Of three inputs, those of the current document; if it starts with the second, the matrix is empty."""
    transformer = MemoryLM(ModelConfig(model=InfiniAttention, **TINY)).transformer
    rule = transformer.memory_rules[0]
    layer = transformer.memory_layers[0]
    slots = torch.rand(5, 1, 8)
    x = torch.randn(3, 1, 8)
    n_valid = None if n_written == 3 else torch.tensor([n_written])
    after, _ = rule.update(LayerMemory(x[:0], slots), x, UpdateContext(layer, x, n_valid))

    (M,), (z,) = matrix_of(slots if n_written == 3 else torch.zeros_like(slots), 2)
    wanted = M.clone()
    norm = z.clone()
    for position in layer.attention_input(x)[3 - n_written :, 0]:
        for head in range(2):
            k = (elu(layer.self_attn.key(position)) + 1).view(2, 4)[head]
            v = layer.self_attn.value(position).view(2, 4)[head]
            held = k @ M[head] / (k @ z[head]) if n_written == 3 else 0.0
            wanted[head] += k[:, None] * (v - held)
            norm[head] += k
    (M,), (z,) = matrix_of(after.slots, 2)
    torch.testing.assert_close(M, wanted)
    torch.testing.assert_close(z, norm)


def test_memory_tokens_are_read_by_the_next_segment_and_carry_a_gradient_if_they_are_to():
    lm = MemoryLM(ModelConfig(model=MemoryTokens, memory_config={"tokens_of_memory": 3}, **TINY))
    text = torch.randint(7, (5, 2))
    for through_memory in (True, False):
        memory = lm(text, through_memory=through_memory).memory
        assert [layer.n_slots for layer in memory.layers] == [3, 0]
        assert memory.layers[0].slots.requires_grad == through_memory
    fresh, after = lm(text).logits, lm(text, memory).logits
    assert not torch.equal(fresh, after)


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


def test_random_positions_are_those_with_the_highest_priority_among_the_unexpired():
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


def test_random_priorities_are_uniform_and_differ_between_layers_and_seeds():
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


def test_random_positions_of_a_new_document_are_those_of_a_fresh_stream():
    rule = RandomPositions(MemorySizes(8, 6, 4, slot_positions=1), RandomPositions.Config())
    x = torch.randn(80, 2, 3)
    beside = read_segments(rule, x, 4, starts=(0, 40))
    fresh = read_segments(rule, x[40:, 1:], 4)
    assert torch.equal(beside.slots[:, 1:], fresh.slots)
    assert torch.equal(beside.slots[:, :1], read_segments(rule, x[:, :1], 4).slots)


@pytest.mark.parametrize("n_valid", [None, 11, 7])
def test_keydiff_keeps_the_positions_whose_keys_have_the_smallest_cosine_with_the_mean(n_valid):
    M, C = 4, 5
    lm = MemoryLM(ModelConfig(model=KeyDiff, mem_len=M, c_mem_len=C, **TINY)).double()
    rule = lm.transformer.memory_rules[0]
    layer = lm.transformer.memory_layers[0]
    older = torch.randn(C + M, 1, 8).double()
    x = torch.randn(5, 1, 8).double()
    lengths = None if n_valid is None else torch.tensor([n_valid])
    after, _ = rule.update(LayerMemory(older[C:], older[:C]), x, UpdateContext(layer, x, lengths))

    every = torch.cat((older, x))[:, 0]
    in_document = [*range(len(every))] if n_valid is None else [*range(len(every) - n_valid, len(every))]
    in_document = [i for i in in_document if i < len(every) - M]  # the newest M stay anyway
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
    assert torch.equal(after.slots[C - len(kept) :, 0], every[kept])
    assert torch.equal(after.mem[:, 0], every[-M:])


def test_keydiff_does_not_read_what_an_earlier_document_left():
    """Not even if it isn't finite."""
    lm = MemoryLM(ModelConfig(model=KeyDiff, mem_len=4, c_mem_len=5, **TINY))
    rule = lm.transformer.memory_rules[0]
    x = torch.randn(8, 1, 8)
    left = torch.full((4, 1, 8), torch.nan)
    context = UpdateContext(lm.transformer.memory_layers[0], x, torch.tensor([8]))
    after, _ = rule.update(LayerMemory(left, left), x, context)
    assert torch.equal(after.slots[1:], x[:4])


def test_a_slot_is_pooled_by_a_softmax_over_its_positions_for_each_feature():
    pooling = SoftmaxPooling(3, 4).double()
    mem = torch.randn(6, 2, 4).double()
    torch.testing.assert_close(pooling(mem), torch.stack((mem[:3].mean(0), mem[3:].mean(0))))
    for parameter in pooling.parameters():
        torch.nn.init.normal_(parameter)
    wanted = torch.empty(2, 2, 4).double()
    for slot in range(2):
        for stream in range(2):
            inputs = mem[3 * slot : 3 * slot + 3, stream]
            values = [pooling.value.weight @ h for h in inputs]
            scores = [pooling.score.weight @ h + pooling.bias[j, 0] for j, h in enumerate(inputs)]
            exps = [score.exp() for score in scores]
            pooled = sum(exp * value for exp, value in zip(exps, values, strict=True))
            wanted[slot, stream] = pooled / sum(exps)
    torch.testing.assert_close(pooling(mem), wanted)


@pytest.mark.parametrize("learned_segments", [1, 2])
def test_the_pooling_learns_from_the_language_model_and_reads_in_training_what_it_reads_afterwards(
    learned_segments,
):
    settings = TINY | {"segment_len": 4, "mem_len": 4, "c_mem_len": 8, "compression_rate": 2, "dropout": 0.0}
    config = ModelConfig(model=PooledSlots, memory_config={"learned_segments": learned_segments}, **settings)
    lm = MemoryLM(config)
    memory = None
    for text in torch.randint(7, (4, 4, 2)):
        memory = lm(text, memory).memory
    text = torch.randint(7, (4, 2))
    output = lm(text, memory)
    torch.testing.assert_close(output.logits, lm.eval()(text, memory).logits)
    assert output.auxiliary_loss == 0
    output.logits.square().mean().backward()
    for pooling in lm.transformer.compressions:
        assert all(parameter.grad.any() for parameter in pooling.parameters())
    # Two slots a segment are learned, and their inputs kept.
    assert len(memory.layers[0].bptt_inputs) == 4 * learned_segments


def gated_delta_reads(layer, x, starts):
    """S_t q_t for each position of one stream's inputs ``x [T, D]`` of ``layer``, by the recurrence of the
    paper; documents begin at ``starts``. ``[T, D]``."""
    attention = layer.self_attn
    reads = []
    for t, z in enumerate(layer.norm_self_attn(x)):
        if t == 0 or t in starts:
            S = [torch.zeros(4, 4).double() for _ in range(2)]
        gates = layer.gates.weight @ z
        by_head = []
        for head in range(2):
            q, k, v = (
                project(z).view(2, 4)[head] for project in (attention.query, attention.key, attention.value)
            )
            q = q / q.norm()
            k = k / k.norm()
            rate = layer.log_rate[head].exp() * softplus(gates[head] + layer.rate_bias[head])
            beta = gates[2 + head].sigmoid()
            erase = torch.eye(4).double() - beta * torch.outer(k, k)
            S[head] = (-rate).exp() * S[head] @ erase + beta * torch.outer(v, k)
            by_head.append(S[head] @ q)
        reads.append(torch.cat(by_head))
    return torch.stack(reads)


@torch.no_grad()
def test_the_reads_of_gated_delta_are_those_of_the_recurrence_over_each_document():
    lm = MemoryLM(ModelConfig(model=GatedDelta, mem_len=7, **TINY)).double().eval()
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter)
    text = torch.randint(7, (60, 2))
    starts = torch.zeros(60, 2, dtype=torch.bool)
    starts[[23, 24, 40], 0] = True  # within a segment, again, and with a segment
    for layer in lm.transformer.memory_layers:
        layer.share.fill_(torch.inf)  # no attention
        inputs = []
        reads = []
        keep_input = layer.register_forward_pre_hook(lambda _, args, kept=inputs: kept.append(args[0]))
        keep_read = layer.self_attn.output.register_forward_pre_hook(
            lambda _, args, kept=reads: kept.append(args[0])
        )
        memory = None
        for part, part_starts in zip(text.split(5), starts.split(5), strict=True):
            memory = lm(part, memory, doc_starts=part_starts).memory
        keep_input.remove()
        keep_read.remove()
        for stream, of_stream in enumerate(((23, 24, 40), ())):
            wanted = gated_delta_reads(layer, torch.cat(inputs)[:, stream], of_stream)
            torch.testing.assert_close(torch.cat(reads)[:, stream], wanted)


def test_gated_delta_without_a_share_of_its_state_is_transformer_xl():
    lm = MemoryLM(ModelConfig(model=GatedDelta, mem_len=7, dropout=0.0, **TINY))
    xl = MemoryLM(ModelConfig(model="transformer-xl", mem_len=7, dropout=0.0, **TINY))
    xl.load_state_dict(lm.state_dict(), strict=False)
    for layer in lm.transformer.memory_layers:
        torch.nn.init.constant_(layer.share, -torch.inf)
    memory = None
    xl_memory = None
    for text in torch.randint(7, (6, 5, 2)):
        output = lm(text, memory)
        wanted = xl(text, xl_memory)
        memory = output.memory
        xl_memory = wanted.memory
        torch.testing.assert_close(output.logits, wanted.logits)


def test_decay_and_writing_strength_of_gated_delta_learn_from_the_language_model():
    lm = MemoryLM(ModelConfig(model=GatedDelta, mem_len=7, **TINY))
    text = torch.randint(7, (5, 2))
    lm(text).logits.square().mean().backward()
    for layer in lm.transformer.memory_layers:
        for parameter in (layer.gates.weight, layer.log_rate, layer.rate_bias, layer.share):
            assert parameter.grad.isfinite().all()
            assert parameter.grad.any()


@torch.no_grad()
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_tova_keeps_the_positions_to_which_the_last_query_of_a_segment_attended_most(positions):
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
def test_tova_keeps_positions_of_the_document_even_if_none_is_attended_to():
    lm = MemoryLM(ModelConfig(model=TOVA, mem_len=4, c_mem_len=5, **TINY)).eval()
    layer = lm.transformer.memory_layers[0]
    layer.self_attn.query.weight.copy_(1e4 * layer.self_attn.key.weight)
    x = torch.randn(1, 1, 8) * torch.tensor([-4.0, -3.0, -2.0, -1.0, 1.0, 2.0, 3.0, 4.0])[:, None, None]
    left = torch.full((4, 1, 8), 7.0)  # of an earlier document
    after, _ = lm.transformer.memory_rules[0].update(
        LayerMemory(left, left), x, UpdateContext(layer, x, torch.tensor([8]))
    )
    assert torch.equal(after.slots[1:], x[:4])


@torch.no_grad()
@pytest.mark.parametrize("n_valid", [None, 17, 12])
def test_rkv_keeps_the_positions_that_are_attended_to_and_not_redundant(n_valid):
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
    after, _ = rule.update(past, x, UpdateContext(layer, x, lengths))

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
            near = [attended.get(neighbor, 0.0) for neighbor in range(j - 3, j + 4)]
            score[j] += 0.4 * max(near) - 0.6 * torch.tensor(similar[j]).exp() / total
    kept = sorted(sorted(members, key=lambda j: -score[j])[:C])
    assert torch.equal(after.slots[C - len(kept) :, 0], every[kept][:, 0])
    assert torch.equal(after.mem, every[-M:])


def test_of_several_copies_rkv_keeps_the_newest():
    settings = {"mem_len": 0, "c_mem_len": 1, "memory_config": {"importance_share": 0.0}}
    lm = MemoryLM(ModelConfig(model=RKV, **settings, **TINY))
    x = torch.randn(1, 1, 8) * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None]  # alike, not equal
    context = UpdateContext(lm.transformer.memory_layers[0], x, None)
    after, _ = lm.transformer.memory_rules[0].update(LayerMemory.nothing(x), x, context)
    assert torch.equal(after.slots, x[3:])


@torch.no_grad()
def test_keep_scores_weigh_attention_and_choose_what_stays():
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

    after, _ = lm.transformer.memory_rules[0].update(past, x, UpdateContext(layer, x, None))
    kept = keep[: K - M].topk(C).indices.sort().values
    assert torch.equal(after.slots[:, 0], every[kept])


def test_keep_scores_start_equal_and_learn_from_the_language_model():
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


@pytest.mark.parametrize(
    "memory", [GatedDelta, InfiniAttention, LearnedEviction], ids=lambda memory: memory.__name__
)
def test_a_matrix_is_not_read_through_a_mask(memory):
    transformer = MemoryLM(ModelConfig(model=memory, **TINY)).transformer
    x = torch.randn(5, 1, 8)
    with pytest.raises(ValueError, match="doc_starts"):
        transformer(x, mask=torch.ones(5, 5, 1, dtype=torch.bool).tril())
