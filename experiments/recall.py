"""The recall of each memory by distance: Transformer-XL and the Compressive Transformer at equal keys.

Run it with ``python experiments/recall.py``; ``--quick`` is a short trial, ``--help`` lists every setting.
Each arm trains from each seed in a separate process, tracked by labml; only the memory differs.
"""

from memformers.commands.compare import Recall

if __name__ == "__main__":
    Recall.main()
