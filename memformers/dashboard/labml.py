"""labml's own server as one application: its records, its handlers and its page, without what labml-app adds
when it starts itself: a MongoDB, a static route that joins paths without a check, answers with stack traces,
and the permission for https://app.labml.ai to call it.

Records are files that are written atomically, copies of what runs have in their folders. They are JSON, with
marks for the types that labml stores besides plain values, and not pickles: a file that someone else wrote
must not run code.
"""

import base64
import json
import logging
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response

# labml's settings require these two; nothing that is used here reads them.
os.environ.setdefault("LABML_APP_SERVER_IP", "127.0.0.1")
os.environ.setdefault("LABML_APP_SERVER_PORT", "5005")

import labml_app
from labml_app import db, handlers, settings
from labml_app.analyses.experiments.metrics import MetricsAnalysis, MetricsPreferencesIndex
from labml_app.analyses.series import Series
from labml_app.db import project, run, user
from labml_app.utils import gen_token
from labml_db import Index, Key, Model
from labml_db.driver.file import FileDbDriver
from labml_db.index_driver.file import FileIndexDbDriver

from memformers.common.errors import UserError
from memformers.common.fields import matches
from memformers.common.files import write_text
from memformers.tracking.discovery import TOKEN, WHO

RUN_ID = re.compile(r"[0-9A-Za-z-]{10,64}(_[0-9]{1,4})?")
"""A run's id as labml's clients make it, followed by the rank of a process after the first."""
PAGE_ROUTE = re.compile(r"(/[\w-]+)*/?")
"""The paths of the views of labml's page, such as /run/1234/compare."""
SETTING = {"name": Any, "computed": Any}
SERIES = {"step": list[float], "value": list[float]}
STATUS = {"status": Any, "details": Any, "time": Any}
PACKET_HAS = {"configs": dict[str, SETTING], "track": dict[str, SERIES], "status": STATUS}  # type: ignore[valid-type]
"""What a packet of a run may have, by the kind of each."""
OURS = '<head><script src="/comparisons/files/labml.js" async></script>'
"""The addition to labml's page: a link to our page, also where the files that it loads from public servers
can't be reached."""


def to_text(record: Any) -> str:
    return json.dumps(record, default=_to_json)


def from_text(text: str) -> dict[str, Any]:
    record = json.loads(text, object_hook=_from_json)
    if not isinstance(record, dict):
        raise UserError(f"it holds a {type(record).__name__}, not a record")
    return record


def _to_json(value: Any) -> Any:
    if isinstance(value, Key):
        return {"$key": str(value)}
    if isinstance(value, set):
        return {"$set": sorted(value)}
    if isinstance(value, np.ndarray):
        return {"$array": base64.b64encode(value.astype("<f8").tobytes()).decode()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} can't be part of a record")


def _from_json(value: dict[str, Any]) -> Any:
    match value:
        case {"$key": key}:
            return Key(key)
        case {"$set": items}:
            return set(items)
        case {"$array": data}:
            return np.frombuffer(base64.b64decode(data), "<f8")
    return value


def use_records(folder: Path) -> None:
    """Let labml keep its models and indexes in ``folder``, which only this process uses, and give it the user
    and projects that it assumes, without runs of which a kill left only a part: they are sent again.
    UserError for a record that can't be read."""
    (folder / "indexes").mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob("*/.*"):  # of a dashboard that was killed
        unfinished.unlink(missing_ok=True)
    # labml's models and indexes are read and written here
    drivers = [RecordDriver(folder, model) for model in db.models]
    Model.set_db_drivers(drivers)
    indexes = {index.__name__: IndexDriver(folder, index) for index in db.indexes}
    Index.set_db_drivers(list(indexes.values()))
    # A record that can't be read is found now, and not when a page asks for it.
    for driver in drivers:
        for key in driver.get_all():
            driver.load_dict(key)
    # The user and the projects that labml's handlers assume
    project.create_project(settings.FLOAT_PROJECT_TOKEN, "float project")
    project.create_project(settings.SAMPLES_PROJECT_TOKEN, "samples project")
    local = user.get_or_create_user("local", is_local_user=True)
    if not local.projects:
        new = project.Project(labml_token=gen_token())
        new.save()
        local.projects = [new.key]
        local.save()
        project.ProjectIndex.set(new.labml_token, new.key)
    project.ProjectIndex.set(TOKEN, local.projects[0])
    # Runs of which a kill left only a part are sent again
    home = project.get_project(TOKEN)
    folders = [key.load().run_uuids for key in home.folders.values()]
    for run_id in list(indexes["RunIndex"].entries):
        record = run.get(run_id)
        state = record and record.status and record.status.load()
        is_listed = run_id in home.runs and any(run_id in ids for ids in folders)
        has_status = state and state.run_status and state.run_status.load()
        if not has_status or (record.rank == 0 and not is_listed):
            home.runs.pop(run_id, None)
            run.RunIndex.delete(run_id)
    home.save()


def read_record(path: Path) -> dict[str, Any] | None:
    try:
        return from_text(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path} can't be read: {error}. Delete {path.parents[1]}, whose files are copies, and bring the "
            f"runs again with --import."
        ) from None


class RecordDriver(FileDbDriver):
    def __init__(self, folder: Path, model: Any):
        super().__init__(None, model, folder / model.__name__)

    def path(self, key: str) -> Path:
        return Path(self._db_path, f"{key}.json")

    def load_dict(self, key: str) -> dict[str, Any] | None:
        return read_record(self.path(key))

    def save_dict(self, key: str, data: dict[str, Any]) -> None:
        write_text(self.path(key), to_text(data))

    def delete(self, key: str) -> None:
        self.path(key).unlink(missing_ok=True)


class IndexDriver(FileIndexDbDriver):
    def __init__(self, folder: Path, index: Any):
        super().__init__(None, index, folder / "indexes" / f"{index.__name__}.json")
        self.entries: dict[str, str] = read_record(self._index_path) or {}
        self._cache = self.entries

    def _save_cache(self) -> None:
        write_text(self._index_path, to_text(self.entries))

    def get_all(self) -> list[str]:
        return list(self.entries.values())  # as labml's driver for MongoDB


def add_labml(app: FastAPI) -> None:
    """Serve labml's page and its API at all addresses that ``app`` doesn't have yet."""
    static = Path(labml_app.__file__).parent / "static"
    files = {}
    for path in static.rglob("*"):
        if path.is_file():
            files[f"/{path.relative_to(static).as_posix()}"] = path
    html = files.pop("/index.html").read_text(encoding="utf-8").replace("<head>", OURS, 1)
    app.add_api_route(WHO, lambda: {"process": os.getpid()})
    app.add_api_route("/api/v1/{labml_token}/track", track, methods=["POST"])
    handlers.add_handlers(app)

    def serve(path: str) -> Response:
        if f"/{path}" in files:
            return FileResponse(files[f"/{path}"])
        if path == "index.html" or (PAGE_ROUTE.fullmatch(f"/{path}") and not path.startswith("api/")):
            return HTMLResponse(html)
        return PlainTextResponse("Not found.", 404)

    app.add_api_route("/{path:path}", serve, response_class=Response)
    Series.find_step_gap = smallest_gap


def is_known(run_id: str) -> bool:
    return run.RunIndex.get(run_id) is not None


def is_packet(packet: Any) -> bool:
    if not isinstance(packet, dict):
        return False
    for name, kind in PACKET_HAS.items():
        if name in packet and not matches(packet[name], kind):
            return False
    return all(len(series["step"]) == len(series["value"]) for series in packet.get("track", {}).values())


async def track(request: Request, labml_token: str) -> Response:
    """labml's own handler of a run's packets, with four changes: the sender doesn't wait for three seconds;
    steps that came before add nothing; all settings are shown, and new losses drawn."""
    query = request.query_params
    run_id = query.get("run_uuid", "")
    ranks = [int(query.get(name, 0)) for name in ("rank", "world_size", "main_rank")]
    packets = await request.json()
    packets = packets if isinstance(packets, list) else [packets]
    if not (RUN_ID.fullmatch(run_id) and all(map(is_packet, packets))):
        message = "a run's id, and objects with its series, are expected"
        return JSONResponse({"errors": [{"error": "invalid_data", "message": message}]}, 400)
    # Without its start, a run is sent again.
    metrics_so_far = list(tracked(run_id))
    if not is_known(run_id) and not any("name" in packet for packet in packets):
        missing = "the start of the run is missing here; the run sends all of it again"
        return JSONResponse({"errors": [{"error": "forgotten", "message": missing}]})
    # What labml stores: all settings, but no step twice
    for packet in packets:
        if "configs" in packet and not (is_known(run_id) and run.get(run_id).configs):  # the user's choice
            packet["selected_configs"] = [setting["name"] for setting in packet["configs"].values()]
        drop_known(run_id, packet)
    request._json = packets
    answer = await handlers._update_run(request, labml_token, query.get("labml_version", ""), run_id, *ranks)
    for packet in packets:
        if "started" in packet and (one := run.get(run_id)):
            one.start_time = packet["started"]
            one.save()
    metrics = list(tracked(run_id))
    if metrics != metrics_so_far:
        choose_losses(run_id, metrics_so_far, metrics)
    return JSONResponse(answer)


def tracked(run_id: str) -> dict[str, Any]:
    metrics = MetricsAnalysis.get(run_id)
    return dict(sorted(metrics.metrics.tracking.items())) if metrics else {}


def drop_known(run_id: str, packet: dict[str, Any]) -> None:
    """Remove steps that the run has from a packet."""
    stored = tracked(run_id)
    for name, series in list(packet.get("track", {}).items()):
        last = stored[name]["last_step"][-1] if name in stored else -math.inf
        steps = []
        values = []
        for step, value in zip(series["step"], series["value"], strict=True):
            if step > last:
                steps.append(step)
                values.append(value)
        if steps:
            series["step"] = steps
            series["value"] = values
        else:
            del packet["track"][name]


def choose_losses(run_id: str, metrics_so_far: list[str], metrics: list[str]) -> None:
    """Draw the losses of a run, and other metrics as the user chose. labml stores this choice by position,
    so a new metric would move it to others."""
    if (key := MetricsPreferencesIndex.get(run_id)) and (preferences := key.load()):
        choice = dict(zip(metrics, preferences.series_preferences, strict=False))
        marks = []  # 1 for a metric that is drawn, otherwise -1
        for name in metrics:
            if name in metrics_so_far:
                marks.append(choice.get(name, -1))
            else:
                marks.append(1 if name.startswith("loss.") else -1)
        preferences.series_preferences = marks
        preferences.save()


def smallest_gap(series: Any) -> float:
    """The smallest distance of points that labml doesn't average. It takes that of the first two, and so
    averages evaluations that are a little closer, even if there are no more than it keeps."""
    if len(series) <= series.max_buffer_length:
        return 1.0
    return max(1.0, float(np.diff(series.last_step).min()))


def quiet_labml(log: Path) -> None:
    """Write all logs to a file, and hide numpy's warnings about the mean of a curve without points."""
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    handler = logging.FileHandler(log, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("LabML logger", "memformers.dashboard", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
