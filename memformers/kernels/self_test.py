"""The self-test of a kernel on the machine where it runs: it must compute what the naive one does."""

import warnings
from collections.abc import Callable
from functools import cache
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.kernels import naive

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
"""The greatest RMS error of a kernel, relative to the RMS value, by dtype."""
B, H, LENGTHS = 2, 2, ((70, 150), (80, 144))
"""Streams, heads, and queries and keys: several tiles, also ragged; compilers treat multiples of 16 apart."""
DROPOUT = 0.3
Kernel = Callable[..., Tensor]


def errors(
    kernel: Kernel, inputs: dict[str, Tensor], key_start: Tensor | None, reference: Kernel
) -> dict[str, float]:
    """The RMS errors of the output of ``kernel`` and of the gradients of its ``inputs``, relative to the RMS
    values of the ``reference`` in float64; queries see the keys from ``key_start [B, S]`` on."""
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    wanted, got = reference(**exact, key_start=key_start), kernel(**inputs, key_start=key_start)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = torch.empty_like(got).copy_(weight)  # in the output's order in memory, as in a model
    all_wanted = wanted, *torch.autograd.grad(wanted, list(exact.values()), weight.double())
    all_got = got, *torch.autograd.grad(got, list(inputs.values()), weight)
    return {
        name: ((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item()
        for name, a, b in zip(("output", *inputs), all_got, all_wanted, strict=True)
    }


def with_dropout(
    kernel: Kernel, inputs: dict[str, Tensor], key_start: Tensor | None
) -> tuple[Kernel, Kernel, Tensor]:
    """``kernel`` with dropout, the same in every call; the naive kernel that drops the same probabilities;
    and which are kept, ``[B, H, S, K]``: with one-hot values, the outputs of ``kernel`` are probabilities."""
    value = inputs["value"]
    (K, E), cuda = value.shape[2:], [value.device] if value.is_cuda else []

    def dropping(**arguments: Tensor | None) -> Tensor:
        with torch.random.fork_rng(cuda):  # every call begins with the same random state, and leaves it so
            return kernel(**arguments, dropout_prob=DROPOUT)

    one_hot = F.pad(torch.eye(K, device=value.device, dtype=value.dtype), (0, -K % E))
    parts = [inputs | {"value": part.expand_as(value)} for part in one_hot.split(E, dim=1)]
    with torch.no_grad():
        kept = torch.cat([dropping(**part, key_start=key_start) for part in parts], dim=-1)[..., :K] != 0

    def reference(value: Tensor, **arguments: Tensor) -> Tensor:
        return (naive.attention_probabilities(**arguments) * kept / (1 - DROPOUT)) @ value

    return dropping, reference, kept


def random_inputs(
    B: int, H: int, S: int, K: int, E: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """A kernel's arguments by name, for both forms of positions, in the attention module's memory order."""
    draw, inputs = torch.Generator().manual_seed(1), {}
    shapes = {"query": (S, B, H, E), "key": (K, B, H, E), "value": (K, B, H, E), "r": (K, H, E)}
    for name, shape in (shapes | {"u": (H, E), "v": (H, E), "s": (H, K)}).items():
        drawn = torch.randn(shape, generator=draw, dtype=torch.float64).to(device, dtype)
        inputs[name] = drawn.movedim(0, -2).requires_grad_()
    return inputs


@cache
def find_mismatch(kernel: Kernel, device: torch.device, dtype: torch.dtype, d_head: int) -> str:
    """Why ``kernel`` can't be trusted on a ``device``, in words; empty if it agrees with the naive kernel on
    small problems, with and without documents and dropout. It is computed once per process."""
    for (S, K), documents, drops in product(LENGTHS, (False, True), (False, True)):
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            inputs, key_start = random_inputs(B, H, S, K, d_head, dtype, device), None
            if documents:  # one that begins in the segment, and one in the memory
                begins = torch.tensor([[K - S // 2], [K // 3]])
                key_start = begins.where(begins <= torch.arange(K - S, K), 0).to(device)
            compared, reference = kernel, naive.relative_attention
            try:
                if drops:
                    compared, reference, _ = with_dropout(kernel, inputs, key_start)
                found = errors(compared, inputs, key_start, reference)
            except Exception as error:  # any error of a compiler or a driver
                return f"can't run here: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        case = f"with S={S}, K={K}" + ", documents" * documents + ", dropout" * drops
        for name, apart in found.items():
            if not apart <= TOLERANCE[dtype]:  # NaN too
                more = f"by {apart:.1e} from the naive kernel, more than {TOLERANCE[dtype]}"
                return f"differs in {name} {more}, {case}"
    return ""


def is_proven(device: torch.device, dtype: torch.dtype, d_head: int) -> bool:
    """Whether the fused kernel has no mismatch by [`find_mismatch`][]; the first call warns if it has."""
    return trust(device, dtype, d_head)  # torch.compile would look into a function that is cached itself


is_proven._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""As ``torch.compiler.assume_constant_result`` does, which would import the compiler, half a second."""


@cache
def trust(device: torch.device, dtype: torch.dtype, d_head: int) -> bool:
    """[`is_proven`][], computed and warned of once per process."""
    from memformers.kernels import fused  # here, since not every machine has Triton

    if said := find_mismatch(fused.relative_attention, device, dtype, d_head):
        instead = f"The naive kernel is used on {device} for {dtype} and d_head={d_head}."
        warnings.warn(f"kernel='fused' {said}. {instead}", RuntimeWarning, stacklevel=2)
    return not said
