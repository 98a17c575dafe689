"""``memformers doctor``: what this machine is, and what will be used on it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from textwrap import fill

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

from memformers.common.fields import Checked, Count
from memformers.common.machine import (
    choose_device,
    describe_environment,
    installed,
    instructions,
    multiplies_bfloat16_faster,
)
from memformers.common.text_format import counted
from memformers.kernels import dispatch, naive
from memformers.kernels.self_test import find_mismatch
from memformers.models.attention import FORCED
from memformers.report.markdown import text_table

WIDTH = 80
"""Of what is printed, in columns."""
AUTO = " (auto)"
"""Follows the name of the kernel that is used if none is named."""
B, H, S, K = 8, 4, 128, 256
"""The streams, heads, queries and keys of the attention that is timed."""


@dataclass(frozen=True)
class Doctor(Checked):
    """Test the attention kernels on this machine, and show which one training uses.

    Example: memformers doctor
    """

    device: str = "auto"
    """What to examine, such as cpu or cuda:1; auto takes a GPU if there is one."""
    d_head: Count = 32
    """Width E of a head."""

    def run(self) -> None:
        """Examine, print."""
        device = choose_device(self.device)
        facts = describe_environment(device)
        packages = facts["packages"] | {"triton": installed("triton")}
        print(f"device      {device}: {facts['device']}")
        cores, threads = facts["cores"], facts["threads"]
        print(f"system      {facts['platform']}, {counted(cores, 'core')}, {counted(threads, 'thread')}")
        print(f"processor   {', '.join(instructions()) or 'its instructions are not known here'}")
        versions = f"Python {facts['python']}, {', '.join(f'{n} {v}' for n, v in packages.items())}"
        print(fill(f"packages    {versions}", WIDTH, subsequent_indent=" " * 12))
        if forced := os.environ.get(FORCED):
            print(f"kernel      {FORCED} names {forced}; without it, auto would be as below")
        rows, kernel = [["kernel", "dtype", "state", "ms"]], forced
        precision = "bfloat16" if multiplies_bfloat16_faster(device) else "float32"
        for dtype in (torch.float32, torch.bfloat16):
            of_type = str(dtype).removeprefix("torch.")
            for name, cells in examine(device, dtype, self.d_head).items():
                rows.append([name, of_type, *cells])
                if name.endswith(AUTO) and of_type == precision:
                    kernel = kernel or name.removesuffix(AUTO)
        print(f"\n{text_table(rows, WIDTH)}\n")
        how = f"B = {B}, H = {H}, S = {S}, K = {K}, d_head = {self.d_head}"
        about = (
            f"ms: forward and backward pass, {how}. SDPA is PyTorch's attention without positions, which no "
        )
        print(fill(f"{about}kernel here is for.", WIDTH))
        used = f"{kernel}, {precision}, {counted(threads, 'thread')}"
        if device.type == "cpu" and threads < cores:
            used += f" (of {cores}: set OMP_NUM_THREADS={cores})"
        print(f"\nTraining here uses: {used}")


def examine(device: torch.device, dtype: torch.dtype, d_head: int) -> dict[str, list[str]]:
    """The state of each kernel and its milliseconds, by its name."""

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype).requires_grad_()

    query, key, value = leaf(B, H, S, d_head), leaf(B, H, K, d_head), leaf(B, H, K, d_head)
    r, u, v = leaf(H, K, d_head), leaf(H, d_head), leaf(H, d_head)
    taken = dispatch.fastest(None, query, key, value, r, u, v)
    found = {}
    for name in dispatch.SUPPORT:
        said = dispatch.unsupported_reason(name, None, query, key, value, r, u, v)
        compute = None if said else partial(kernel_of(name), query, key, value, r, u=u, v=v)
        said = said or ("" if name == "naive" else find_mismatch(kernel_of(name), device, dtype, d_head))
        state = said or ("the definition" if name == "naive" else "agrees with naive")
        marked = f"{name}{AUTO}" if name == taken else name
        found[marked] = [state, f"{milliseconds(compute):.2f}" if compute and not said else "–"]
    sdpa = partial(F.scaled_dot_product_attention, query, key, value)
    return found | {"SDPA": ["no positions", f"{milliseconds(sdpa):.2f}"]}


def kernel_of(name: dispatch.KernelName) -> Callable[..., Tensor]:
    """The function of a kernel, from query ``[B, H, S, E]`` and the others to the output ``[B, H, S, E]``."""
    home = naive if name == "naive" else import_module(f"memformers.kernels.{name}")
    compute: Callable[..., Tensor] = home.relative_attention
    return compute


def milliseconds(compute: Callable[[], Tensor]) -> float:
    """The median time of a forward and backward pass of ``compute``, which returns ``[B, H, S, E]``."""
    timer = Timer(
        "compute().sum().backward()", globals={"compute": compute}, num_threads=torch.get_num_threads()
    )
    return 1e3 * timer.blocked_autorange(min_run_time=0.05).median
