"""Restores what labml's server assumes of its records: its user and project exist, every run has a status and
is on the runs page, and no record refers to a missing one."""

from typing import Any

from labml_app import settings
from labml_app.analyses.experiments.custom_metrics import CustomMetricsListIndex
from labml_app.analyses.experiments.metrics import (
    MetricsPreferencesIndex,
    MetricsPreferencesModel,
)
from labml_app.db import project, run, status, user
from labml_app.utils import gen_token
from labml_db import Key

from memformers.dashboard.records import Records
from memformers.tracking.discovery import TOKEN


def mend(records: Records) -> None:
    """Check and repair all records, after one was lost."""
    assign_default_user()
    home = project.get_project(TOKEN)
    assert home is not None
    for key in records.drivers["Run"].get_all():
        one = Key(key).load()
        if one is not None and run.RunIndex.get(one.run_uuid) is None:
            run.RunIndex.set(one.run_uuid, one.key)
    ids = list(records.indexes["RunIndex"].entries)
    home.runs = {run_id: key for run_id, key in home.runs.items() if run_id in ids}
    home.folders = {name: key for name, key in home.folders.items() if key.load() is not None}
    home.save()
    for run_id in ids:
        one = run.get(run_id)
        mend_status(one)
        # Those on the runs page, and in the archive.
        listed = any(run_id in key.load().run_uuids for key in home.folders.values())
        if one.rank == 0 and one.is_claimed and not (one.run_uuid in home.runs and listed):
            home.add_run_with_model(one)
    for run_id in records.indexes["MetricsIndex"].entries:
        if MetricsPreferencesIndex.get(run_id) is None:
            preferences = MetricsPreferencesModel()
            preferences.save()
            MetricsPreferencesIndex.set(run_id, preferences.key)
    for run_id in list(records.indexes["CustomMetricsListIndex"].entries):
        try:
            CustomMetricsListIndex.get(run_id).load().get_data()
        except AttributeError:  # it refers to a missing record
            CustomMetricsListIndex.delete(run_id)


def mend_status(one: Any) -> None:
    """Give a run an unknown status if its own was lost."""
    state = one.status.load() if one.status else None
    if state is None:
        state = status.create_status()
        one.status = state.key
        one.save()
    elif state.run_status and state.run_status.load():
        return
    lost = status.RunStatus(status="unknown", time=one.start_time)
    lost.save()
    state.run_status = lost.key
    state.save()


def assign_default_user() -> None:
    """Assign runs that are sent with our token to the only user that labml's server knows."""
    project.create_project(settings.FLOAT_PROJECT_TOKEN, "float project")
    project.create_project(settings.SAMPLES_PROJECT_TOKEN, "samples project")
    local = user.get_or_create_user("local", is_local_user=True)
    if not local.projects or local.projects[0].load() is None:
        new = project.Project(labml_token=gen_token())
        new.save()
        local.projects = [new.key]
        local.save()
        project.ProjectIndex.set(new.labml_token, new.key)
    project.ProjectIndex.set(TOKEN, local.projects[0])
