"""Memories with a state, or with slots, compute what their papers' equations say."""

import pytest
import torch
from torch.nn.functional import elu, softplus

from experiments.memories.gated_delta import GatedDelta
from experiments.memories.infini import InfiniAttention, matrix_of
from experiments.memories.memory_tokens import MemoryTokens
from experiments.memories.pooled_slots import PooledSlots, SoftmaxPooling
from memformers import LayerMemory, MemoryLM, ModelConfig, UpdateContext
from tests.experiments.networks import TINY


@pytest.mark.parametrize("n_written", [3, 2])
def test_the_delta_rule_writes_only_what_is_new(n_written):
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


def test_memory_tokens_carry_a_gradient_on_request():
    lm = MemoryLM(ModelConfig(model=MemoryTokens, memory_config={"tokens_of_memory": 3}, **TINY))
    text = torch.randint(7, (5, 2))
    for through_memory in (True, False):
        memory = lm(text, through_memory=through_memory).memory
        assert [layer.n_slots for layer in memory.layers] == [3, 0]
        assert memory.layers[0].slots.requires_grad == through_memory
    fresh, after = lm(text).logits, lm(text, memory).logits
    assert not torch.equal(fresh, after)


def test_pooling_is_a_softmax_over_positions_by_feature():
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
def test_pooling_learns_from_the_language_model(
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
def test_gated_delta_reads_like_its_recurrence():
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


def test_gated_delta_without_its_state_is_transformer_xl():
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


def test_gated_delta_learns_to_decay_and_write():
    lm = MemoryLM(ModelConfig(model=GatedDelta, mem_len=7, **TINY))
    text = torch.randint(7, (5, 2))
    lm(text).logits.square().mean().backward()
    for layer in lm.transformer.memory_layers:
        for parameter in (layer.gates.weight, layer.log_rate, layer.rate_bias, layer.share):
            assert parameter.grad.isfinite().all()
            assert parameter.grad.any()
