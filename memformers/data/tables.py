"""Tables as streams of documents, one in each row: Hugging Face's datasets reads them, in constant memory.

Plain text and JSON lines are read without it, so that they need no extra; and so is what is compressed, since
readers of zstandard stop after the first of several frames. Parquet is read by pyarrow, which datasets uses:
datasets decodes all of a group of rows at once, and takes a gigabyte for one of that size.
"""

import codecs
import csv
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from memformers.common.errors import UserError, one_line
from memformers.common.files import read_json
from memformers.data.files import (
    BLOCK,
    DECOMPRESSORS,
    JSON_SUFFIXES,
    blocks_of,
    bytes_of,
    check_characters,
    plain_name,
    texts_in,
)

TABLE_KINDS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}
"""How datasets calls each kind of table, by the suffix of its file."""
TEXT_FIELD = "text"
"""The column that is read if none is named."""
DELIMITERS = ",;\t"
ROWS = 256
"""Rows that are in memory at once; they may be whole books."""
LINE_END = re.compile(r"[\r\n]")
HUB = "hf://datasets/"
HUB_NAME = re.compile(
    r"hf://datasets/(?P<name>[^/?]+/[^/?]+)(?:/(?P<config>[^/?]+))?(?:\?split=(?P<split>\w+))?"
)
SAVED_STATE = "state.json"
SAVED_INFO = "dataset_info.json"
INSTALL = "pip install datasets"


class HubTable(NamedTuple):
    """A split of a dataset on Hugging Face's hub."""

    name: str  # OWNER/NAME
    config: str | None
    split: str


def table_kind(name: str, field: str) -> str:
    """How datasets calls the kind of the file ``name``, which may be compressed; empty if it is no table. A
    .tar may be any archive, so it is a table only if a ``field`` of it is named."""
    kind = TABLE_KINDS.get(Path(plain_name(name)).suffix.lower(), "")
    return "" if kind == "webdataset" and (field == TEXT_FIELD or not name.lower().endswith(".tar")) else kind


def is_hub_name(name: str) -> bool:
    """Whether ``name`` is a dataset on the hub, not one of its files."""
    matched = HUB_NAME.fullmatch(name)
    if not matched:
        return False
    suffix = Path(matched["config"] or "").suffix.lower()
    return suffix not in (*TABLE_KINDS, *JSON_SUFFIXES, *DECOMPRESSORS, ".zip", ".txt")


def import_reader(module: str, label: str) -> Any:
    """The ``module`` that reads the table called ``label``: datasets, or a part of what it depends on."""
    try:
        return import_module(module)
    except ImportError:
        raise UserError(f"{label} is a table, which Hugging Face's datasets reads: {INSTALL}.") from None


def documents_in_table(path: Path, kind: str, field: str) -> Iterator[tuple[str, str]]:
    """The place and the text of each row of the table at ``path``, in its column ``field``."""
    label = str(path)
    import_reader("pyarrow" if kind == "parquet" else "datasets", label)
    with plain_copy(path, kind) as file, TemporaryDirectory(prefix="memformers-") as cache:
        if kind == "parquet":
            cells = cells_in_parquet(file, label, field)
        else:
            options: dict[str, Any] = {"data_files": [str(file)], "split": "train", "cache_dir": cache}
            if kind == "csv":
                options |= csv_options(file, path, field)
            elif kind == "json":
                options["parse_agent_traces"] = False
            cells = cells_in_stream(label, field, kind, **options)
        yield from documents_in_cells(path.name, label, field, cells)


def documents_on_hub(table: HubTable, field: str) -> Iterator[tuple[str, str]]:
    """The place and the text of each row of a dataset on the hub, of which no copy is kept."""
    label = f"{HUB}{table.name}"
    cells = cells_in_stream(label, field, table.name, table.config, split=table.split)
    return documents_in_cells(table.name, label, field, cells)


def hub_tables(name: str) -> list[HubTable]:
    """The splits of the dataset ``name`` on the hub, or the one that it names."""
    matched = HUB_NAME.fullmatch(name)
    assert matched
    config = matched["config"]
    if matched["split"]:
        return [HubTable(matched["name"], config, matched["split"])]
    datasets = import_reader("datasets", name)
    try:
        splits = datasets.get_dataset_split_names(matched["name"], config)
    except Exception as error:  # of the network, of the hub or of datasets
        raise UserError(f"{name} can't be read: {one_line(error)}; name another dataset.") from None
    return [HubTable(matched["name"], config, split) for split in splits]


def documents_in_cells(
    name: str, label: str, field: str, cells: Iterator[list[Any]]
) -> Iterator[tuple[str, str]]:
    """The place and the text of each of the ``cells`` of the column ``field``; ``label`` is for errors."""
    n_rows = 0
    try:
        for cell in chain.from_iterable(cells):
            n_rows += 1
            row = f"{label}, row {n_rows}"
            if not isinstance(cell, str):
                raise UserError(f"{row}: expected a text as {field!r}, got {repr(cell)[:40]}; correct it.")
            yield f"{name}:{n_rows}", check_characters(cell, row)
    except UserError:
        raise
    except Exception as error:  # of a dozen libraries
        problem = f"can't be read after row {n_rows:,}: {one_line(error)}"
        raise UserError(f"{label}: {field!r} {problem}; name a column of texts with text_field.") from None


def cells_in_parquet(file: Path, label: str, field: str) -> Iterator[list[Any]]:
    """The cells of the column ``field``, ``ROWS`` at once."""
    parquet = import_reader("pyarrow.parquet", label)
    # A group of rows may be the whole table, so it is read page by page.
    with parquet.ParquetFile(file, pre_buffer=False, buffer_size=BLOCK) as table:
        check_column(field, table.schema_arrow.names, label)
        for batch in table.iter_batches(ROWS, columns=[field]):
            yield batch.column(field).to_pylist()


def cells_in_stream(label: str, field: str, *arguments: Any, **options: Any) -> Iterator[list[Any]]:
    """The cells of the column ``field`` of what ``load_dataset`` reads with these arguments and options,
    ``ROWS`` at once."""
    datasets = import_reader("datasets", label)
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # an error is one line, ours
    try:
        stream = datasets.load_dataset(*arguments, streaming=True, **options)
        # Samples of webdataset have their fields in any order, which Arrow doesn't take.
        is_arrow = arguments[0] != "webdataset"
        if is_arrow:
            stream = stream.with_format("arrow")
        for batch in strict_batches(stream.iter(batch_size=ROWS)):
            check_column(field, batch.column_names if is_arrow else list(batch), label)
            yield batch.column(field).to_pylist() if is_arrow else batch[field]
    finally:
        datasets.logging.set_verbosity(verbosity)


def check_column(field: str, names: Sequence[str], label: str) -> None:
    if field not in names:
        columns = ", ".join(map(repr, names[:20]))
        raise UserError(f"{label}: no column {field!r} among {columns}; name one with text_field.")


def strict_batches(batches: Iterator[Any]) -> Iterator[Any]:
    """``batches``, where pandas may not drop columns of a row with a warning alone."""
    from pandas.errors import ParserWarning

    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ParserWarning)
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def csv_options(file: Path, path: Path, field: str) -> dict[str, Any]:
    """How datasets reads a .csv or .tsv file as it is: all columns are texts, also numbers and "NA", and no
    row is longer than the first one, which names them."""
    from datasets import Features, Value

    first = first_line(file, str(path))
    # Cells of a .tsv file may contain commas, also where it has one column.
    delimiters = reversed(DELIMITERS) if file.suffix.lower() == ".tsv" else DELIMITERS
    for delimiter in delimiters:
        try:
            columns = next(csv.reader([first], delimiter=delimiter), [])
        except csv.Error:
            continue
        if field in columns:
            # As pandas calls a column without a name, such as its index.
            names = [column or f"Unnamed: {number}" for number, column in enumerate(columns)]
            features = Features(dict.fromkeys(names, Value("string")))
            strict = {"index_col": False, "keep_default_na": False, "features": features}
            return {"sep": delimiter, "chunksize": ROWS, **strict}
    raise UserError(
        f"{path}: no column {field!r} in the first row, {first[:99]!r}; name one with text_field."
    )


def first_line(file: Path, label: str) -> str:
    """The first line of a table, which may end with a carriage return alone, as pandas reads it."""
    text = ""
    for block in texts_in(blocks_of(file), label):
        text += block
        if LINE_END.search(text):
            break
    return LINE_END.split(text, maxsplit=1)[0]


@contextmanager
def plain_copy(path: Path, kind: str) -> Iterator[Path]:
    """The file at ``path``, or a copy that is decompressed and, for texts, in UTF-8."""
    is_compressed = plain_name(path.name) != path.name
    is_text = kind in ("csv", "json")
    if not is_compressed and not (is_text and is_utf16(path)):
        yield path
        return
    with TemporaryDirectory(prefix="memformers-") as folder:
        copy = Path(folder, plain_name(path.name))
        with open(copy, "wb") as file:
            if is_text:
                file.writelines(bytes_of(text) for text in texts_in(blocks_of(path), str(path)))
            else:
                file.writelines(blocks_of(path))
        yield copy


def is_utf16(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def describes_tables(path: Path) -> bool:
    """Whether the file at ``path`` only describes tables that datasets saved, beside it or below."""
    if path.name == "dataset_dict.json":
        return True
    if path.name == "nshards.txt":  # of webdataset
        return any(path.parent.glob("*.tar"))
    return path.name in (SAVED_STATE, SAVED_INFO) and any(path.parent.glob("*.arrow"))


def saved_shards(folder: Path) -> list[str]:
    """The names of the .arrow files that save_to_disk listed in ``folder``, in order; none if it wrote
    nothing there. Others there are copies that datasets made later."""
    if not (folder / SAVED_STATE).is_file() or not any(folder.glob("*.arrow")):
        return []
    state = read_json(folder / SAVED_STATE)
    try:
        shards = [str(shard["filename"]) for shard in state["_data_files"]]
    except (KeyError, TypeError):
        problem = f"expected {folder / SAVED_STATE} to list the .arrow files of datasets"
        raise UserError(f"{problem}; save the dataset again.") from None
    for shard in shards:
        if not (folder / shard).is_file():
            raise UserError(f"{folder} has no {shard}, which its {SAVED_STATE} lists; copy the folder again.")
    return shards
