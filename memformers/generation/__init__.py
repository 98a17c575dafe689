"""Text from a trained model: reading a prompt, sampling, and generation."""
