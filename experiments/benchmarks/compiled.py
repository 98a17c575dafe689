"""What the compiler makes of the fused kernels on GPUs, without having one: registers, stack, shared memory.

Run it with ``python -m experiments.benchmarks.compiled`` on Linux with Triton; it writes ``COMPILED.md`` and
``compiled.json`` beside itself. Each kernel is compiled with the arguments with which it is launched.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from experiments.benchmarks.measuring import Result
from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.files import write_json, write_text
from memformers.kernels import fused
from memformers.kernels.dispatch import SUPPORT
from memformers.report.markdown import DASH, table


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
TRIED = """\
The tiles, warps and stages were chosen so that in half precision no kernel spills on sm_90, and hardly any \
on sm_80. What lost, in bytes of stack per thread:

- The backward passes in bfloat16 with tiles of 64 × 64, 4 warps and 2 stages (8 warps at d_head 128): on \
sm_90 up to 248 by query, 288 by key and 400 by distance; on sm_80 up to 928 by query, 600 by distance and \
5,360 by key, there in 32 registers. Tiles of 32 × 32 need none on sm_90 and 8 at most on sm_80.
- The gradient by distance at d_head 32 with 2 stages and tiles of 32 × 32: up to 16 on sm_90 and 8 on \
sm_80. With 1 stage it needs none.
- The backward passes in float32 at d_head 64 with tiles of 32 × 32: up to 336 by key; by distance up to 336 \
on sm_80, 744 on sm_90 and 4,160 on sm_100, there in 32 registers. Tiles of 16 × 16 need 16 at most on sm_80 \
and sm_90.
- With dropout, the tiles without it: up to 64 bytes on sm_90 and 80 on sm_80, most in the forward pass. \
Its tiles of 32 × 32 need none.
- d_head 256 in bfloat16 with tiles of 32 × 32 and 8 warps: up to 296 by key, and 4,680 by distance. \
The gradient by distance with tiles of 16 × 16 and 1 stage: up to 32 with 8 warps and 256 with 4. With 8 \
warps and 2 stages it needs none.

In float32, where heads are 128 wide at most, the widest still spill: a product takes no smaller tile than \
16. At d_head 256, the gradients had up to 5,904 bytes of stack."""
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Options:
    """Compile the fused kernels ahead of time."""

    gpus: tuple[str, ...] = tuple(GPUS)
    """Which GPUs."""
    widths: tuple[int, ...] = WIDTHS
    """Which widths of a head."""
    dtypes: tuple[str, ...] = tuple(DTYPES)
    """Which dtypes."""
    out: Path = Path(__file__).parent
    """The folder to write into."""


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


def attention(width: int, dtype: torch.dtype, form: str) -> list[Tensor | float | None]:
    """The inputs of an attention of heads of this ``width``, of two streams, two heads, 128 queries and 256
    keys, in one of the ``FORMS``: query, key, value, r, u, v, s, the key starts, and the seed and the share
    of dropout."""
    query, key = torch.zeros(2, 2, 128, width, dtype=dtype), torch.zeros(2, 2, 256, width, dtype=dtype)
    r = torch.zeros(2, 256, width, dtype=dtype)
    u, s = torch.zeros(2, width), torch.zeros(2, 256)  # parameters, which autocast leaves in float32
    key_start = None if form == FORMS[0] else torch.zeros(2, 128, dtype=torch.int32)
    dropout = (torch.tensor(0), 0.1) if "dropout" in form else (None, 0.0)
    return [query, key, key, r, u, u, s, key_start, *dropout]


def compile_all(gpu: Gpu, width: int, dtype: torch.dtype, form: str) -> list[Result]:
    """What each kernel of an attention's forward and backward pass needs."""
    inputs = attention(width, dtype, form)
    with compiling_for(gpu) as compiled:
        out, lse = fused.fused_attention(*inputs)
        fused.fused_attention_backward(out, out, lse, *inputs)
    return [{"kernel": name} | needs(kernel, gpu) for name, kernel in compiled.items()]


def needs(kernel: Any, gpu: Gpu) -> Result:
    """What a compiled kernel needs: registers and bytes of stack per thread, bytes of shared memory per
    program, and how many programs run on a multiprocessor at a time."""
    meta = kernel.metadata
    found = (of_amd if gpu.target.backend == "hip" else of_nvidia)(kernel.asm)
    granted = -(-found["registers"] // 8) * 8 * gpu.target.warp_size * meta.num_warps
    programs = min(gpu.registers // granted, gpu.shared // meta.shared, 64 // meta.num_warps)
    return found | {"shared": meta.shared, "warps": meta.num_warps, "programs": programs}


def of_nvidia(asm: Mapping[str, Any]) -> dict[str, int]:
    """Registers and stack, as ``cuobjdump`` reports them."""
    with tempfile.TemporaryDirectory() as folder:
        (cubin := Path(folder) / "kernel.cubin").write_bytes(asm["cubin"])
        done = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", done.stdout)[-1]
    return {"registers": int(registers), "stack": int(stack)}


def of_amd(asm: Mapping[str, Any]) -> dict[str, int]:
    """Registers and stack, as the assembly's metadata has them."""
    names = {"registers": r"\.vgpr_count:\s+(\d+)", "stack": r"\.private_segment_fixed_size:\s+(\d+)"}
    found = {name: re.search(pattern, asm["amdgcn"]) for name, pattern in names.items()}
    return {name: int(match[1]) for name, match in found.items() if match}


def main(options: Options) -> None:
    """Compile everything, and write it down."""
    forms = [
        (gpu, width, dtype, form)
        for gpu in options.gpus
        for dtype in options.dtypes
        for width in options.widths
        for form in FORMS
        if width <= SUPPORT["fused"].widest(DTYPES[dtype])
    ]
    rows = []
    for gpu, width, dtype, form in tqdm(forms, desc="compiling"):
        how = {"gpu": gpu, "dtype": dtype, "width": width, "form": form}
        found = compile_all(GPUS[gpu], width, DTYPES[dtype], form)
        rows += [how | of for of in found if of["kernel"] not in ("dot_rows", "split_keys")]
    results = {"triton": triton.__version__, "kernels": rows}
    write_json(options.out / "compiled.json", results)
    write_text(options.out / "COMPILED.md", report(results))


def report(results: Result) -> str:
    """The results as Markdown: for each GPU a row for each kernel and dtype, with the cells of all widths."""
    parts = [
        "# The fused kernels as they are compiled",
        f"By Triton {results['triton']}, without a GPU: `python -m experiments.benchmarks.compiled`. Cells "
        "are registers per thread / bytes of stack per thread / KiB of shared memory per program / programs "
        "on a multiprocessor at a time. Documents are `key_start`. What is on the stack was spilled out of "
        "registers. Nothing here was run.",
        TRIED,
    ]
    for gpu in dict.fromkeys(row["gpu"] for row in results["kernels"]):
        own = [row for row in results["kernels"] if row["gpu"] == gpu]
        widths = list(dict.fromkeys(row["width"] for row in own))
        lines: dict[tuple[str, str, str], dict[int, str]] = {}
        for row in own:
            cells = lines.setdefault((row["kernel"], row["dtype"], row["form"]), {})
            needed = row["registers"], row["stack"], f"{row['shared'] / 1024:.0f}", row["programs"]
            cells[row["width"]] = " / ".join(map(str, needed))
        body = [[*name, *(cells.get(width, DASH) for width in widths)] for name, cells in lines.items()]
        heads = ["kernel", "dtype", "with", *(f"d_head {width}" for width in widths)]
        parts += [f"## {gpu}", table(heads, body)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    with plain_errors():
        main(parse_arguments(Options))
