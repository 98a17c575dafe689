"""The groups in which ``--help`` shows the options of trainings and comparisons."""

from memformers.common.command_line import Group

GROUPS = {
    "comparison": Group("The comparison, in addition to the models.", ("arms", "equal_keys")),
    "run": Group("How a run begins or continues, and where it is shown.", ("resume", "seed", "dashboard")),
    "network": Group(
        "The layers, which are the same for every model.",
        (
            "model", "d_model", "heads", "n_layers", "d_ff", "dropout", "norm", "positions",
            "position_features", "clamp_len", "kernel", "vocab_size",
        ),
    ),
    "memory": Group(
        "What is remembered between segments.",
        ("segment_len", "mem_len", "c_mem_len", "compression_rate", "same_length", "memory_warmup", "tbptt"),
    ),
    "compression": Group(
        "What makes compressed slots of old memories, and what it learns from.",
        ("compression", "compression_start", "compression_loss", "bptt"),
    ),
    "embedding": Group(
        "How tokens become vectors, and vectors predictions.",
        ("embedding", "cutoffs", "div_val", "d_embed", "tie_weights", "tie_projections"),
    ),
    "text": Group(
        "How the text is read.", ("document_separator", "tokenizer", "tokens", "batch_size", "chunk_len")
    ),
    "optimizer": Group(
        "How the weights are learned.",
        (
            "optimizer", "learning_rate", "muon_learning_rate", "beta2", "warmup", "weight_decay",
            "max_grad_norm", "skip_bad_steps",
        ),
    ),
    "evaluation": Group(
        "What is measured during training.", ("evaluations", "evaluation_share", "log_every")
    ),
    "checkpoint": Group(
        "What is kept for --resume.", ("checkpoint_every", "checkpoint_minutes", "keep_checkpoints")
    ),
    "hardware": Group(
        "Where and in which precision a training is computed.",
        ("device", "precision", "compile", "parallel", "accumulate", "activation_checkpointing"),
    ),
}  # fmt: skip
