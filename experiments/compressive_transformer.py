"""Compressive Transformer on Tiny Shakespeare: one run, tracked by labml.

Run it with ``python experiments/compressive_transformer.py``; ``--help`` lists every setting.
"""

from experiments.transformer_xl import main

if __name__ == "__main__":
    main("compressive")
