"""The time of a training step by kind of operator, from the profiler."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

KINDS = {
    "matrix products": {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "linear"},
    "softmax": {
        "softmax", "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
    },
    "layer norm": {"layer_norm", "native_layer_norm", "native_layer_norm_backward"},
    "fused attention": {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    },
    "copies": {
        "copy_", "cat", "fill_", "zero_", "clone", "contiguous", "constant_pad_nd", "flip", "empty",
        "empty_like", "empty_strided", "zeros", "zeros_like", "stack", "resize_", "slice_backward",
        "select_backward", "_to_copy",
    },
    "elementwise": {
        "add", "add_", "mul", "mul_", "sub", "sub_", "div", "div_", "relu", "threshold_backward", "sum",
        "where", "masked_fill", "masked_fill_", "neg", "pow", "triu_", "tril", "bitwise_not", "mse_loss",
        "mse_loss_backward", "mean", "embedding", "index_select", "embedding_dense_backward",
    },
}  # fmt: skip
"""Operators, without ``aten::``, of every kind except the last two."""
OPTIMIZER, OTHER = "clip and optimizer", "everything else"


def kind_of(operator: str) -> str:
    """The kind of an operator by its name in a profile."""
    if operator.startswith(("aten::_fused_adam", "aten::_foreach", "Optimizer.")):
        return OPTIMIZER
    name = operator.removeprefix("aten::")
    return next((kind for kind, names in KINDS.items() if name in names), OTHER)


def shares_of_time(step: Callable[[], object], steps: int = 3) -> dict[str, float]:
    """The fraction of each kind in the operators' own time, over some steps."""
    with profile(activities=[ProfilerActivity.CPU]) as measured:
        for _ in range(steps):
            step()
    times = dict.fromkeys([*KINDS, OPTIMIZER, OTHER], 0.0)
    for event in measured.key_averages():
        times[kind_of(event.key)] += event.self_cpu_time_total
    total = sum(times.values())
    return {kind: time / total for kind, time in times.items()}
