"""Several experiments in one folder, and one report of them all."""

from collections.abc import Callable, Mapping
from pathlib import Path

from memformers.common.errors import TrainingsFailed, UserError
from memformers.comparison.experiment import Experiment, run_experiment
from memformers.runs.folder import EXPERIMENT, OF_AN_EXPERIMENT, RESULT, check_named, refuse_overwrite


def run_experiments(
    experiments: Mapping[str, Experiment],
    folder: Path,
    report: Callable[[Path], Path],
    dashboard: str = "",
    *,
    resume: bool = False,
    measure: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Run each of ``experiments`` in a sub-folder of its name, ``measure`` what was trained there, and write
    the ``report`` of all of them; returns its page.

    A training run that fails doesn't stop the others: the report is written, and says so. Raises UserError
    for a folder that holds other experiments, and as
    [`run_experiment`][memformers.comparison.experiment.run_experiment] does.
    """
    check_named(folder)
    if not any(folder.glob(f"*/{EXPERIMENT}")):
        refuse_overwrite(folder, OF_AN_EXPERIMENT)
    elif not resume:
        raise UserError(f"{folder} already holds experiments; name a new folder, or resume this one.")
    failed = []
    for name, experiment in experiments.items():
        try:
            run_experiment(experiment, folder / name, dashboard, resume=resume)
        except TrainingsFailed as error:
            failed.append(f"{name}: {error}")
        if any((folder / name).glob(f"*/{RESULT}")):
            measure(folder / name)
    if any(folder.glob(f"*/*/{RESULT}")):
        page = report(folder)
        if not failed:
            return page
        failed.append(f"The results so far are in {page}; --resume trains the rest.")
    raise TrainingsFailed(" ".join(failed))
