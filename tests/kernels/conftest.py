from importlib.util import find_spec

import pytest
import torch

from tests.kernels.against_naive import DEVICE


@pytest.fixture
def bfloat16_as_on_the_gpu(monkeypatch):
    """The interpreter cuts float32 to bfloat16 without rounding, and multiplies bits as whole numbers."""
    if DEVICE == "cuda" or find_spec("triton") is None:
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert, multiply = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def round_to_nearest(x, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(x, source, target, mode)
        rounded = torch.from_numpy(np.array(x, np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)

    def multiply_numbers(self, a, b, *rest):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *rest)

    monkeypatch.setattr(interpreter, "_convert_float", round_to_nearest)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiply_numbers)
