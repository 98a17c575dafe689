"""How much of their training runs have done, and about how long they still take."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from memformers.runs.folder import in_use
from memformers.runs.metrics import SECONDS, TOKENS
from memformers.runs.reader import FINISHED, RUNNING, Run, Runs, finite_number


def share_trained(runs: Sequence[Run]) -> float:
    budget = sum(run.budget for run in runs)
    return sum(run.tokens for run in runs) / budget if budget else 0.0


def seconds_left(runs: Runs) -> float | None:
    """About how many seconds ``runs`` still take: their start-ups, training steps and evaluations. None
    before the first record, and if nothing is being trained. The probe and the report at the end of an
    experiment are not counted."""
    # How many are trained at once
    n_at_a_time = [run.state[0] for run in runs.all].count(RUNNING)
    if n_at_a_time == 0 and in_use(runs.folder):
        n_at_a_time = 1  # an experiment is about to start its next run
    pace = measure_pace(runs.all)
    if pace is None or n_at_a_time == 0:
        return None

    # What each still needs
    left = 0.0
    for run in runs.all:
        if run.state[0] != FINISHED:
            left += startup_left(run, pace) + training_left(run, pace) + evaluation_left(run, pace)
    return left / n_at_a_time


@dataclass(frozen=True)
class Pace:
    """Average seconds per unit of work, over all runs that have begun."""

    startup: float
    """Seconds from the start of a process to its first step; 0 if no experiment started it."""
    token: float
    """Seconds per token of training."""
    evaluated_token: float
    """Seconds per token of an evaluation, including its share of the samples that are generated; before the
    first evaluation, the value for training."""
    n_evaluated: float
    """How many tokens all evaluations of a run on a text read; 0 for other tasks."""
    evaluation_by_token: float
    """Seconds of evaluations so far per token of training."""
    evaluation: float | None
    """Seconds of all evaluations of a finished run."""


def measure_pace(runs: Sequence[Run]) -> Pace | None:
    """The pace of ``runs`` so far; None before the first record."""
    # What has been recorded: tokens and seconds of training and of evaluations
    n_trained = 0.0
    training_seconds = 0.0
    n_evaluated = 0.0
    evaluation_seconds = 0.0
    for run in runs:
        n_trained += run.last(TOKENS) or 0.0
        training_seconds += run.last(SECONDS) or 0.0
        n_evaluated += evaluated_tokens(run)
        evaluation_seconds += run.last("evaluation_seconds") or 0.0
    if not n_trained:
        return None

    # What is known of a run as a whole, of runs that have started, are planned or have finished
    startups = []
    planned = []
    finished = []
    for run in runs:
        if run.startup_seconds is not None:
            startups.append(run.startup_seconds)
        n_planned = planned_evaluation(run)
        if n_planned:
            planned.append(n_planned)
        seconds = finite_number((run.result or {}).get("evaluation_seconds"))
        if seconds is not None:
            finished.append(seconds)

    token = training_seconds / n_trained
    return Pace(
        startup=fmean(startups) if startups else 0.0,
        token=token,
        evaluated_token=evaluation_seconds / n_evaluated if n_evaluated else token,
        n_evaluated=fmean(planned) if planned else 0.0,
        evaluation_by_token=evaluation_seconds / n_trained,
        evaluation=fmean(finished) if finished else None,
    )


def startup_left(run: Run, pace: Pace) -> float:
    return 0.0 if run.state[0] == RUNNING else pace.startup


def training_left(run: Run, pace: Pace) -> float:
    """At the run's own speed once it has one, since arms are of different speed."""
    done = run.last(TOKENS)
    seconds = run.last(SECONDS)
    token = seconds / done if done and seconds else pace.token
    return token * (run.budget - run.tokens)


def evaluation_left(run: Run, pace: Pace) -> float:
    done = run.last("evaluation_seconds") or 0.0
    if pace.evaluation is not None:
        return max(pace.evaluation - done, 0.0)
    n_planned = planned_evaluation(run) or pace.n_evaluated
    if not n_planned:
        return pace.evaluation_by_token * (run.budget - run.tokens)
    return pace.evaluated_token * max(n_planned - evaluated_tokens(run), 0.0)


def evaluated_tokens(run: Run) -> float:
    """How many tokens the evaluations that a run has recorded have read."""
    return float(run.metrics.points("evaluated_tokens")[2].sum())


def planned_evaluation(run: Run) -> float | None:
    """How many tokens all evaluations of a run on a text read, the last one included; None for other tasks
    and for a run that hasn't begun."""
    corpus = run.facts.get("corpus")
    n_held_out = finite_number(corpus.get("held_out_tokens")) if isinstance(corpus, dict) else None
    n_evaluations = finite_number(run.settings.get("evaluation.evaluations"))
    n_first = finite_number(run.settings.get("evaluation.evaluation_tokens"))
    n_final = finite_number(run.settings.get("evaluation.final_tokens"))
    if n_held_out is None or n_evaluations is None or n_first is None or n_final is None:
        return None
    n_first = min(n_first or n_held_out, n_held_out)  # 0 reads all
    n_final = min(n_final or n_held_out, n_held_out)
    return n_evaluations * n_first + (n_final if n_final != n_first else 0.0)
