"""labml's web page, file by file, and local copies of the files that it would load from the network."""

import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import platformdirs

from memformers.common.errors import UserError
from memformers.common.files import replacing


@dataclass(frozen=True)
class Package:
    """An npm package that the page uses."""

    name: str
    """The name of the folder of the copy."""
    url: str
    """The address from which the page loads it by default."""
    file: str
    """The same file in the package."""
    folders: tuple[str, ...] = ()
    """The folders of files that this file loads."""

    def local(self) -> str:
        """The path of a local copy in the folder of copies, and below LOCAL on the server."""
        return f"{self.name}/{self.file}"


PACKAGES = {
    "d3@6.7.0": Package("d3", "https://d3js.org/d3.v6.min.js", "dist/d3.min.js"),
    "bootstrap@5.0.0-beta2": Package(
        "bootstrap",
        "https://cdn.jsdelivr.net/npm/bootstrap@5.0.0-beta2/dist/css/bootstrap.min.css",
        "dist/css/bootstrap.min.css",
    ),
    "@fortawesome/fontawesome-free@5.9.0": Package(
        "fontawesome",
        "https://cdnjs.cloudflare.com/ajax/libs/font-awesome/5.9.0/css/all.css",
        "css/all.css",
        folders=("webfonts",),
    ),
}
"""The packages that labml-app 0.5.14's page loads from public servers, in the versions that it requests."""
LOCAL = "/local/"
ON_LABML_PAGE = (
    '<link href="/comparisons/files/on_labml_page.css" rel="stylesheet">'
    '<script src="/comparisons/files/on_labml_page.js" defer></script>'
)
"""The addition to labml's page: a link to our page of comparisons."""


def copies_folder() -> Path:
    """The folder of the local copies."""
    return platformdirs.user_data_path("memformers") / "page"


def page_files(static: Path) -> dict[str, Path]:
    """Every file that may be served, by its path on the server: labml's page, and the copies. No other file
    can be requested, since no path is ever joined."""
    copies = copies_folder()
    files = {f"/{path.relative_to(static).as_posix()}": path for path in _files(static)}
    return files | {f"{LOCAL}{path.relative_to(copies).as_posix()}": path for path in _files(copies)}


def index_page(static: Path) -> tuple[str, list[str]]:
    """labml's page, with the local copies that exist, and the names of those that are missing."""
    html = (static / "index.html").read_text(encoding="utf-8")
    missing = []
    for package in PACKAGES.values():
        if (copies_folder() / package.local()).is_file():
            html = html.replace(package.url, LOCAL + package.local())
        else:
            missing.append(package.name)
    return html.replace("</head>", f"{ON_LABML_PAGE}</head>"), missing


def fetch_copies() -> Path:
    """Download the copies with the user's npm; returns their folder. ValueError if that fails."""
    npm = shutil.which("npm")
    if npm is None:
        raise UserError(
            f"npm is not installed; install it, or copy {copies_folder()} from a machine that has it."
        )
    with TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", "--pack-destination", folder]
        for specification, package in PACKAGES.items():
            result = subprocess.run([*command, specification], capture_output=True, text=True, check=False)
            archives = list(Path(folder).glob("*.tgz"))
            if result.returncode or len(archives) != 1:
                reason = " ".join(result.stderr.split())[:300] or "it made no archive"
                raise UserError(f"npm pack {specification} failed: {reason}")
            unpack(archives[0], package)
            archives[0].unlink()
    return copies_folder()


def unpack(archive: Path, package: Package) -> None:
    """Extract the files of an npm package that the page needs: regular files whose names are known
    beforehand."""
    home = copies_folder() / package.name
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            inside = member.name.partition("/")[2]
            folder, _, name = inside.rpartition("/")
            if member.isfile() and (inside == package.file or (folder in package.folders and name)):
                data = tar.extractfile(member)
                assert data is not None
                path = home / inside
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as temporary:
                    temporary.write_bytes(data.read())


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
