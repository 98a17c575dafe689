"""A run is a folder that holds everything about one training:

config.json      the TrainConfig
run.json         corpus, parameters, hardware, versions, command, git commit
metrics.jsonl    every record, as it came
labml.json       what a dashboard knows it by
labml.log        what labml said
checkpoints/     from which it goes on after whatever happened; see memformers.training.checkpoints
sample.txt       text written at the end
result.json      the last evaluation, time, peak memory and the prompt of the sample
probe.json       what a probe measured; a comparison's is beside its runs' folders
"""

from collections.abc import Sequence
from pathlib import Path

from memformers.common.errors import UserError
from memformers.common.files import check_utf8_name

CONFIG, FACTS, METRICS, CARD, LOG = "config.json", "run.json", "metrics.jsonl", "labml.json", "labml.log"
CHECKPOINTS, SAMPLE, RESULT, PROBE = "checkpoints", "sample.txt", "result.json", "probe.json"
PLAN = "recall.json"
"""The plan of a recall experiment, in its folder."""
COMPARISON = "compare.json"
"""The arms and seeds of a comparison, in its folder."""
REPORT, PAGE, FIGURES = "report.md", "report.html", "figures"
OF_A_RUN = (CONFIG, FACTS, CARD, LOG, SAMPLE, RESULT, PROBE, REPORT, PAGE)
OF_A_COMPARISON = (PROBE, REPORT, PAGE)


def check_named(folder: Path) -> None:
    """Raise UserError for an empty name, which means the current folder, and for one that is not UTF-8."""
    check_utf8_name(folder)
    if folder == Path():
        raise UserError("out='' is the current folder; name a folder for the run.")


def check_nothing_is_lost(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError if ``folder`` already contains files with these ``names`` that no run has written."""
    if taken := [name for name in names if (folder / name).exists()]:
        raise UserError(
            f"{folder} has a {taken[0]} that no run wrote and that would be overwritten; name a new folder."
        )
