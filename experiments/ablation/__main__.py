"""The Compressive Transformer's ablation (Rae et al. 2020), on a text and on a stream with known answers.

Run it with ``make ablation`` or ``python -m experiments.ablation``; ``--quick`` is a short trial, ``--help``
lists every setting. Each row of the table is trained from each seed, twice: as an arm of a comparison on a
text, in FOLDER/text, and as an arm of the recall experiment, in FOLDER/recall. Only the memory differs.
Finished trainings are kept; ``--resume`` continues, and adds rows and seeds.
"""

from experiments.ablation.experiment import Ablation, ablation
from memformers.commands.places import say_report
from memformers.common.command_line import parse_arguments, plain_errors

if __name__ == "__main__":
    with plain_errors():
        arguments: Ablation = parse_arguments(Ablation)
        say_report(ablation(arguments, arguments.folder()))
