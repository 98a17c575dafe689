"""What a trained model's memory is worth to it: how far back it helps, and how far back it looks."""
