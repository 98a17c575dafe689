"""What the compiler makes of the fused kernels on GPUs, without having one: registers, stack, shared memory.
Each kernel is compiled with the arguments with which it is launched."""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from experiments.benchmarks.measuring import Result
from memformers.kernels import SUPPORT, fused


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, and what a multiprocessor of it has."""

    target: GPUTarget
    shared: int
    """Bytes of shared memory that its programs can have."""
    registers: int = 65_536


GPUS = {
    "sm_80": Gpu(GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_90": Gpu(GPUTarget("cuda", 90, 32), 227 << 10),
    "sm_100": Gpu(GPUTarget("cuda", 100, 32), 227 << 10),
    "gfx942": Gpu(GPUTarget("hip", "gfx942", 64), 64 << 10, 131_072),
}
"""An A100, an H100, a B200 (NVIDIA, CUDA C++ programming guide, technical specifications per compute
capability) and an MI300X (AMD, CDNA 3 instruction set architecture)."""
WIDTHS = (32, 64, 128, 256)
"""Widths of a head."""
FORMS = ("–", "documents", "documents, dropout")
"""What a kernel is compiled with."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@contextmanager
def compiling_for(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """A block in which launching a kernel only compiles it, as for ``gpu``; gives the compiled kernels, by
    their names."""
    compiled: dict[str, Any] = {}
    run = JITFunction.run
    there = SimpleNamespace(
        get_current_target=lambda: gpu.target,
        get_current_device=lambda: gpu.target.arch,
        get_current_stream=lambda device: 0,
    )

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled[kernel.fn.__name__] = run(kernel, *args, grid=grid, warmup=True, **kwargs)

    with (
        patch.object(driver, "_active", there),
        patch.object(JITFunction, "run", compile_only),
        patch.object(fused, "shared_memory", lambda device: gpu.shared),
    ):
        yield compiled


def compile_all(gpu: Gpu, width: int, dtype: torch.dtype, form: str) -> list[Result]:
    """What each kernel of an attention's forward and backward pass needs: of two streams, two heads of this
    ``width``, 128 queries and 256 keys, in one of the ``FORMS``."""
    query, key = torch.zeros(2, 2, 128, width, dtype=dtype), torch.zeros(2, 2, 256, width, dtype=dtype)
    r = torch.zeros(2, 256, width, dtype=dtype)
    u, s = torch.zeros(2, width), torch.zeros(2, 256)  # parameters, which autocast leaves in float32
    key_start = None if form == FORMS[0] else torch.zeros(2, 128, dtype=torch.int32)
    dropout = (torch.tensor(0), 0.1) if "dropout" in form else (None, 0.0)
    inputs = [query, key, key, r, u, u, s, key_start, *dropout]
    with compiling_for(gpu) as compiled:
        out, lse = fused.fused_attention(*inputs)
        fused.fused_attention_backward(out, out, lse, *inputs)
    return [{"kernel": name} | needs(kernel, gpu) for name, kernel in compiled.items()]


def needs(kernel: Any, gpu: Gpu) -> Result:
    """What a compiled kernel needs: registers and bytes of stack per thread, bytes of shared memory per
    program, and how many programs run on a multiprocessor at a time."""
    meta = kernel.metadata
    if gpu.target.backend == "hip":  # as the assembly's metadata has them
        names = {"registers": r"\.vgpr_count:\s+(\d+)", "stack": r"\.private_segment_fixed_size:\s+(\d+)"}
        pairs = ((name, re.findall(pattern, kernel.asm["amdgcn"])) for name, pattern in names.items())
        found = {name: int(numbers[0]) for name, numbers in pairs}
    else:
        with tempfile.TemporaryDirectory() as folder:
            (cubin := Path(folder) / "kernel.cubin").write_bytes(kernel.asm["cubin"])
            said = subprocess.check_output([CUOBJDUMP, "-res-usage", cubin], text=True)
        numbers = re.findall(r"REG:(\d+) STACK:(\d+)", said)[-1]
        found = dict(zip(("registers", "stack"), map(int, numbers), strict=True))
    granted = -(-found["registers"] // 8) * 8 * gpu.target.warp_size * meta.num_warps
    programs = min(gpu.registers // granted, gpu.shared // meta.shared, 64 // meta.num_warps)
    return found | {"shared": meta.shared, "warps": meta.num_warps, "programs": programs}


def compile_forms(
    gpus: Sequence[str] = (*GPUS,), widths: Sequence[int] = WIDTHS, dtypes: Sequence[str] = (*DTYPES,)
) -> Result:
    """What all kernels need on these ``gpus``, for heads of these ``widths`` and for these ``dtypes``."""
    rows = []
    for gpu, dtype, width, form in tqdm([*product(gpus, dtypes, widths, FORMS)], desc="compiling"):
        if width <= SUPPORT["fused"].widest(DTYPES[dtype]):
            how = {"gpu": gpu, "dtype": dtype, "width": width, "form": form}
            found = compile_all(GPUS[gpu], width, DTYPES[dtype], form)
            rows += [how | of for of in found if of["kernel"] not in ("dot_rows", "split_keys")]
    return {"triton": triton.__version__, "kernels": rows}
