"""Relative attention as pure functions of tensors.

The letters and axes of this project, used everywhere and explained only here:

| letter | meaning |
|---|---|
| S | tokens in the segment being processed (the queries) |
| M | memory: past layer inputs, kept as they are |
| C | compressed memory: each slot represents ``compression_rate`` (c) positions |
| K | keys in order of time, ``K = C + M + S`` |
| B | batch: parallel streams of text |
| H | heads |
| D | ``d_model``, the width of the model |
| E | ``d_head = D / H`` |

Modules take and give ``[S, B, D]``; kernels take and give ``[B, H, S, E]`` (queries) and
``[B, H, K, E]`` (keys, values), as ``torch.nn.functional.scaled_dot_product_attention`` does.
The order changes only in [`memformers.models.attention`][].
"""
