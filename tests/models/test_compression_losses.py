"""What compression functions learn from, and compression functions of a user's own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memformers import (
    AttentionReconstructionLoss,
    AutoEncodingLoss,
    CompressionAutoEncoder,
    CompressiveTransformer,
    Conv1dCompression,
    MaxCompression,
)
from memformers.models.memory import Memory
from memformers.models.memory_sizes import MemorySizes
from tests.builders import fill_zeros, small_compressive, small_lm
from tests.texts import gradients, read, same, tokens

LENGTHS = [MemorySizes(mem_len=5, c_mem_len=4, compression_rate=3)] * 2


class Newest(nn.Module):
    """A compression of a user's own: the newest position of a slot, through a map."""

    compression_rate = 3

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(12, 12)

    def forward(self, mem):
        return self.map(mem[2::3])


def stack_of(compress, *loss):
    """A stack of two layers with copies of this f_c."""
    layer = copy.deepcopy(small_compressive().layers[0])
    layer.compress = compress
    return fill_zeros(CompressiveTransformer(layer, 2, *loss))


def read_stack(stack, segments=3, doc_starts=None):
    """The last output, memory and auxiliary loss of random segments."""
    memory = Memory(())
    for _ in range(segments):
        x = torch.randn(7, 2, 12)
        output, inputs = stack(x, memory.mem, memory.c_mem, doc_starts=doc_starts, valid=memory.valid)
        memory, auxiliary_loss = stack.remember(memory, inputs, LENGTHS, doc_starts)
    return output, memory, auxiliary_loss


def auto_encoders():
    return [CompressionAutoEncoder(Conv1dCompression(3, 12), 12) for _ in range(2)]


def memories(streams=2, length=9):
    return [torch.randn(length, streams, 12) for _ in range(2)]


def a_loss(kind, streams=2):
    """One of both losses of two layers, as a function of memories, of slots if they are made already, and of
    how many are left out; and the parameters of the whole stack."""
    if kind == "auto-encoding":
        compressions = auto_encoders()
        return AutoEncodingLoss(compressions), nn.ModuleList(compressions)
    stack, h = small_compressive(), memories(streams, 7)
    loss = AttentionReconstructionLoss(stack.layers)

    def of_streams(mem, c_mem=None, left_out=None, only=slice(None)):
        return loss([x[:, only] for x in h], mem, c_mem, left_out)

    return of_streams, stack


def is_compression(name):
    return ".compress." in name


@pytest.mark.parametrize(
    "settings",
    [*({"positions": p, "norm": n} for p in ("learned", "sinusoidal") for n in ("pre", "post")),
     {"compression": "dilated"},
     {"compression_loss": "auto-encoding"},
     {"compression": "dilated", "compression_loss": "auto-encoding"}],
)  # fmt: skip
@pytest.mark.parametrize("auxiliary", [False, True])
def test_one_loss_reaches_the_compression_with_its_decoder_and_the_other_all_else(auxiliary, settings):
    lm, text = small_lm("compressive", **settings), tokens(21)
    logits, losses, _ = read(lm, text)
    (losses[-1] if auxiliary else F.cross_entropy(logits.flatten(0, 1), text.flatten())).backward()
    for name, parameter in lm.named_parameters():
        reached = parameter.grad is not None and bool(parameter.grad.any())
        assert reached == (is_compression(name) == auxiliary), name
    of_compressions = {id(p) for f_c in lm.transformer.compressions for p in f_c.parameters()}
    assert of_compressions == {id(p) for name, p in lm.named_parameters() if is_compression(name)}


@pytest.mark.parametrize("kind", ["attention", "auto-encoding"])
def test_a_loss_learns_to_compress_a_fixed_batch_and_changes_nothing_else(kind):
    loss, stack = a_loss(kind, 4)
    # 3 positions of 4 numbers each fit into a slot of 12.
    mem = [(torch.randn(9, 4, 4) @ torch.randn(4, 12)).requires_grad_() for _ in range(2)]
    before = {name: p.detach().clone() for name, p in stack.named_parameters()}
    optimizer, first = torch.optim.Adam(stack.parameters(), lr=1e-2), loss(mem).item()
    for _ in range(200):
        optimizer.zero_grad()
        loss(mem).backward()
        optimizer.step()
    assert loss(mem).item() < 0.5 * first
    assert all(old.grad is None for old in mem)
    for name, parameter in stack.named_parameters():
        learns = is_compression(name) or kind == "auto-encoding"
        assert torch.equal(parameter, before[name]) != learns, name


@pytest.mark.parametrize("kind", ["attention", "auto-encoding"])
def test_given_compressions_are_used_and_not_made_again(kind):
    (loss, stack), mem = a_loss(kind), memories()
    f_cs = [layer.compress for layer in stack.layers] if kind == "attention" else stack
    c_mem = [f_c(old) for f_c, old in zip(f_cs, mem, strict=True)]
    torch.testing.assert_close(loss(mem, c_mem), loss(mem))
    assert loss(mem, [torch.zeros_like(c) for c in c_mem]) != loss(mem)
    if kind == "auto-encoding":
        errors = [(old - f_c.decode(c)).square().mean() for f_c, old, c in zip(f_cs, mem, c_mem, strict=True)]
        torch.testing.assert_close(loss(mem), sum(errors))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", ["attention", "auto-encoding"])
def test_slots_that_are_left_out_are_as_if_they_and_their_positions_were_not_there(kind):
    (loss, stack), mem = a_loss(kind, 4), memories(4)
    streams = {0: 0, 1: 2, 3: 1}  # and of stream 2, all 3 slots
    alone = []
    for b, slots in streams.items():
        only = {"only": [b]} if kind == "attention" else {}
        alone.append(loss([x[3 * slots :, b, None] for x in mem], **only))
    found, wanted = loss(mem, left_out=torch.tensor([0, 2, 3, 1])), torch.stack(alone).mean()
    same([found, *gradients(stack, found)], [wanted, *gradients(stack, wanted)])
    nothing = loss(mem, left_out=torch.full((4,), 3))
    assert nothing == 0
    assert not any(grad.any() for grad in gradients(stack, nothing))


def test_a_decoder_is_a_transposed_convolution_whose_kernel_and_stride_are_the_rate():
    f_c, slots = auto_encoders()[0], torch.randn(4, 2, 12)
    kernel = f_c.decoder.weight.squeeze(2).unflatten(0, (3, 12)).permute(2, 1, 0)  # [D, D, c]
    bias = f_c.decoder.bias.unflatten(0, (3, 12)).T  # [D, c], one for each position of a slot
    wanted = F.conv_transpose1d(slots.permute(1, 2, 0), kernel, stride=3) + bias.repeat(1, 4)
    torch.testing.assert_close(f_c.decode(slots), wanted.permute(2, 0, 1))


@pytest.mark.parametrize("compression", ["mean", "max"])
def test_without_a_loss_memories_are_the_same_and_the_auxiliary_loss_is_0(compression):
    measured, silent = (
        small_lm("compressive", compression=compression, compression_loss=loss)
        for loss in ("attention", "none")
    )
    silent.load_state_dict(measured.state_dict())
    text = tokens(28)
    (logits, losses, memory), (wanted, nothing, others) = (read(lm, text) for lm in (measured, silent))
    assert torch.equal(logits, wanted)
    assert not any(nothing)
    assert losses[-1] > 0
    assert memory.c_mem_len == 4
    assert all(map(torch.equal, memory.c_mem, others.c_mem))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_compression_of_a_users_own_works_and_learns_in_a_stack(wrapped):
    own = CompressionAutoEncoder(Newest(), 12) if wrapped else Newest()
    stack = stack_of(own, "auto-encoding" if wrapped else "attention")
    doc_starts = torch.zeros(7, 2, dtype=torch.bool)
    doc_starts[6, 1] = True
    for begins in (None, doc_starts):
        stack.zero_grad()
        output, memory, auxiliary_loss = read_stack(stack, doc_starts=begins)
        auxiliary_loss.backward()
        assert output.shape == (7, 2, 12)
        assert memory.c_mem_len == 4
        assert all(p.grad.any() for f_c in stack.compressions for p in f_c.parameters())


class Wrong(nn.Module):
    """An f_c that makes slots of another length or width."""

    def __init__(self, every=3, width=12):
        super().__init__()
        self.every, self.width = every, width

    def forward(self, mem):
        return mem[:: self.every, :, : self.width]


@pytest.mark.parametrize(
    ("compress", "made"),
    [(Wrong(every=2), "[2, 2, 12]"), (Wrong(width=5), "[1, 2, 5]"), (nn.Identity(), "[3, 2, 12]")],
)
def test_slots_of_another_number_or_width_are_an_error_of_one_line(compress, made):
    with pytest.raises(ValueError, match="expected") as error:
        read_stack(stack_of(compress), segments=1)
    said = str(error.value)
    assert f"{type(compress).__name__} to make [1, 2, 12] of memories [3, 2, 12]" in said
    assert f"got {made}" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: stack_of(Newest(), "squares"), "compression_loss='squares'"),
        (lambda: stack_of(Newest(), "auto-encoding"), "needs a decoder beside f_c, got Newest"),
        (lambda: stack_of(Newest(), "none"), "would not train Newest"),
        *(
            (lambda loss=loss: stack_of(CompressionAutoEncoder(Newest(), 12), loss), "not train the decoder")
            for loss in ("attention", "none")
        ),
        (lambda: CompressionAutoEncoder(nn.Identity(), 12), "Identity has no compression_rate"),
        (lambda: AutoEncodingLoss(auto_encoders())(memories()[:1]), "each of 2 layers, got 1"),
        (
            lambda: AttentionReconstructionLoss(small_compressive().layers)(memories()[:1], memories()),
            "each of 2 layers, got 1 and 2",
        ),
    ],
)
def test_a_loss_that_can_not_be_computed_or_train_the_compression_is_an_error(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_stack_without_a_loss_takes_what_has_no_parameters_or_learns_no_more():
    assert read_stack(stack_of(MaxCompression(3), "none"))[2] == 0
    assert read_stack(stack_of(Newest().requires_grad_(False), "none"))[2] == 0


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


def test_compression_runs_once_a_step():
    lm = small_lm("compressive")
    calls = []
    for layer in lm.transformer.layers:
        layer.compress.register_forward_hook(lambda *_: calls.append(1))
    lm(torch.randint(0, 11, (7, 2)))
    assert len(calls) == 2  # one for each layer
