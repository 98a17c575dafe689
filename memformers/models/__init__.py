"""The models: attention, layers, memory, compression, and the language model around them."""
