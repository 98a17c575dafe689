"""The recall of each memory by distance: Transformer-XL and the Compressive Transformer at equal keys.

Run it with ``python experiments/recall.py``; ``--quick`` is a short trial, ``--help`` lists every setting.
Each arm trains from each seed in a separate process, tracked by labml; only the memory differs.
"""

from memformers.commands.recall import Recall
from memformers.common.command_line import parse_arguments, plain_errors


def main(arguments: Recall) -> None:
    """Train all arms alike and write the report that compares them."""
    report = arguments.recall()
    print(f"report: {report}")


if __name__ == "__main__":
    with plain_errors():
        main(parse_arguments(Recall))
