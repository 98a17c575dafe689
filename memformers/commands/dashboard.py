"""``memformers dashboard``: labml's dashboard of all runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from memformers.common.errors import UserError
from memformers.common.fields import Checked, Range


@dataclass(frozen=True)
class Dashboard(Checked):
    """Watch runs in a browser: labml's dashboard, with nothing to set up. Ctrl-C ends it.

    Example: memformers dashboard --open
    """

    folder: Path | None = None
    """The folder of its records; by default in the user's folder for data."""
    host: str = "127.0.0.1"
    """The address to listen on. There is no login: with another address, everyone who can reach it sees all
    runs."""
    port: Annotated[int, Range(0, 65535)] = 5005
    """The port to listen on; 0 takes any free port."""
    import_: Annotated[tuple[Path, ...], tyro.conf.arg(name="import", metavar="RUNS")] = ()
    """Folders of runs or comparisons to import, which were trained while no dashboard ran."""
    open: bool = False
    """Whether to open the page in the browser."""

    def run(self) -> None:
        try:
            from memformers.dashboard.pages import serve
        except ImportError as error:
            install = "pip install '.[dashboard]' in a clone of the repository"
            raise UserError(f"the dashboard needs {error.name}, which is not installed: {install}") from None
        serve(self.folder, self.host, self.port, self.import_, self.open)
