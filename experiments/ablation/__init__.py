"""The Compressive Transformer's own ablation: what compresses, and what it learns from."""
