"""How many floating-point operations a model's matrix products ask for; a multiply-add is two.

Counted from the definition, whatever a kernel does to need fewer: every query meets all K keys, also
those that the causal mask hides; keys and values of the whole memory are projected anew.
"""

from memformers import ModelConfig


def attention_forward(B: int, H: int, S: int, K: int, E: int) -> int:
    """Relative attention of S queries over K keys: content scores, position scores, and values."""
    return 3 * 2 * B * H * S * K * E


def forward(config: ModelConfig, batch_size: int) -> int:
    """A segment's forward pass with full memories and learned positions, compression and its
    reconstruction loss included."""
    S, B, D = config.segment_len, batch_size, config.d_model
    K, c = S + config.mem_len, config.compression_rate
    if config.model == "transformer":
        K = S
    if config.model == "compressive":
        K += config.c_mem_len
    projections = 2 * (2 * S + 2 * K) * B * D * D  # queries and output; keys and values
    attention = attention_forward(B, config.heads, S, K, D // config.heads)
    feed_forward = 2 * 2 * S * B * D * config.d_ff
    layer = projections + attention + feed_forward
    if config.model == "compressive":
        n = S // c  # slots that a segment's worth of positions becomes
        compression = 2 * n * B * (c * D) * D
        reconstruction = 2 * (S + 2 * S + 2 * n) * B * D * D  # queries; keys, values of old and of new
        reconstruction += 2 * 2 * S * (S + n) * B * D  # scores and values over old and over new
        layer += compression + reconstruction
    return config.n_layers * layer + 2 * S * B * D * config.vocab_size


def training(forward_flops: int) -> int:
    """Forward and backward: 3 times the forward pass, since each product of two matrices that both
    take a gradient is followed by two of the same size.

    It counts too much for what takes no gradient: the remembered inputs of the key and value
    projections (2 times), and in the reconstruction loss the attention over what was compressed
    (once) and all frozen weights (2 times).
    """
    return 3 * forward_flops
