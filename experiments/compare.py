"""No memory, Transformer-XL and Compressive Transformer, side by side on Tiny Shakespeare.

Run it with ``python experiments/compare.py``; ``--scale 0.1`` is a short trial, ``--help`` lists every
setting. Each model trains in a separate process, tracked by labml; only the memory differs.
"""

from memformers.commands.compare import Compare

if __name__ == "__main__":
    Compare.main()
