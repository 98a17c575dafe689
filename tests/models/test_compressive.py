import pytest
import torch
import torch.nn.functional as F

from memformers import AttentionReconstructionLoss, Conv1dCompression
from memformers.models.memory import Memory
from tests.builders import small_compressive, small_lm


def compression(name: str) -> bool:
    return ".compress." in name


def test_a_rate_below_one_and_a_rest_are_errors():
    with pytest.raises(ValueError, match="compression_rate=0"):
        Conv1dCompression(0, 4)
    with pytest.raises(ValueError, match="7 memories don't fill whole slots of compression_rate=3"):
        Conv1dCompression(3, 4)(torch.randn(7, 1, 4))


def segments_until_something_is_compressed(lm):
    memory = Memory(())
    for _ in range(3):
        tokens = torch.randint(0, 11, (7, 2))
        logits, memory, auxiliary_loss = lm(tokens, memory)
    assert memory.c_mem_len > 0
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), auxiliary_loss


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("auxiliary", [False, True])
def test_one_loss_reaches_the_compression_and_the_other_all_else(auxiliary, positions, norm):
    lm = small_lm("compressive", positions=positions, norm=norm)
    segments_until_something_is_compressed(lm)[auxiliary].backward()
    for name, parameter in lm.named_parameters():
        reached = parameter.grad is not None and parameter.grad.abs().sum() > 0
        assert reached == (compression(name) == auxiliary), name


def test_the_auxiliary_loss_lowers_the_reconstruction_error_on_a_fixed_batch():
    model = small_compressive()
    loss = AttentionReconstructionLoss(model.layers)
    h = [torch.randn(7, 4, 12) for _ in model.layers]
    mem = [torch.randn(9, 4, 12) for _ in model.layers]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    first = loss(h, mem).item()
    for _ in range(200):
        optimizer.zero_grad()
        loss(h, mem).backward()
        optimizer.step()
    assert loss(h, mem).item() < 0.5 * first
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != compression(name), name


def test_given_compressions_are_used_and_not_made_again():
    model = small_compressive()
    loss = AttentionReconstructionLoss(model.layers)
    h = [torch.randn(7, 2, 12) for _ in model.layers]
    mem = [torch.randn(9, 2, 12) for _ in model.layers]
    c_mem = [layer.compress(old) for layer, old in zip(model.layers, mem, strict=True)]
    torch.testing.assert_close(loss(h, mem, c_mem), loss(h, mem))
    assert loss(h, mem, [torch.zeros_like(c) for c in c_mem]) != loss(h, mem)


@pytest.mark.usefixtures("float64")
def test_slots_that_are_left_out_are_as_if_they_and_their_positions_were_not_there():
    model = small_compressive()
    loss = AttentionReconstructionLoss(model.layers)
    h = [torch.randn(7, 4, 12) for _ in model.layers]
    mem = [torch.randn(9, 4, 12) for _ in model.layers]
    streams = {0: 0, 1: 2, 3: 1}  # and of stream 2, all 3 slots
    alone = [
        loss([x[:, b, None] for x in h], [x[3 * slots :, b, None] for x in mem])
        for b, slots in streams.items()
    ]
    left_out = torch.tensor([0, 2, 3, 1])
    results = []
    for found in (loss(h, mem, left_out=left_out), torch.stack(alone).mean()):
        grads = torch.autograd.grad(found, list(model.parameters()), allow_unused=True)
        results.append([found, *(grad for grad in grads if grad is not None)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    nothing = loss(h, mem, left_out=torch.full((4,), 3))
    assert nothing == 0
    nothing.backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_compression_runs_once_a_step():
    lm = small_lm("compressive")
    calls = []
    for layer in lm.transformer.layers:
        layer.compress.register_forward_hook(lambda *_: calls.append(1))
    lm(torch.randint(0, 11, (7, 2)))
    assert len(calls) == 2  # one for each layer


def test_in_post_norm_the_loss_compares_attention_over_memories_as_they_are():
    layer = small_compressive(norm="post").layers[0]
    h, mem = torch.randn(5, 2, 12), torch.randn(6, 2, 12)

    def content_attention(context):
        query, key, value = (
            map(x).unflatten(-1, (3, 4)).permute(1, 2, 0, 3)
            for map, x in (
                (layer.self_attn.query, h),
                (layer.self_attn.key, context),
                (layer.self_attn.value, context),
            )
        )
        return (query @ key.mT / 2.0).softmax(-1) @ value

    wanted = (content_attention(mem) - content_attention(layer.compress(mem))).square().mean()
    torch.testing.assert_close(AttentionReconstructionLoss([layer])([h], [mem]), wanted)


def test_the_loss_wants_one_tensor_a_layer():
    model = small_compressive()
    with pytest.raises(ValueError, match="each of 2 layers were expected; 1 and 2 came"):
        AttentionReconstructionLoss(model.layers)([torch.zeros(1, 1, 12)], [torch.zeros(3, 1, 12)] * 2)
