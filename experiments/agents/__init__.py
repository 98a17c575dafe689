"""An agent that remembers: PPO on memory transformers and nn.GRU."""
