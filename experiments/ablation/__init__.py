"""The ablation of the Compressive Transformer: compression functions, and the losses that train them."""
