"""Random files, valid and broken, with what is in them by readers that the package doesn't use."""

import bz2
import csv
import gzip
import io
import json
import lzma
import zipfile

import numpy as np
import zstandard

from tests.data.reading import saved

WORDS = ["a", "the", "naïve", "king", "橋", "🌉", "said:", '"so"', "x,y", "it's", "1", "2.50", "NA", "-", "…"]
ENDS = ["\n", "\n\n", " ", "\r\n", "\t", ". "]
COMPRESSORS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
TEXT_KINDS = (".txt", ".md", "", ".log")
LINE_KINDS = (".jsonl", ".ndjson", ".jsonlines")
TABLE_KINDS = (".csv", ".tsv", ".json", ".parquet", ".arrow")
ID_KINDS = (".bin", ".uint16.bin", ".uint32.bin", ".uint64.bin", ".npy", ".idx.bin", ".header.bin", ".ds")
N_IDS = 3000
# What is expected of a file that can't be read.
ERROR = "error"


def random_text(rng, n_words=40):
    parts = []
    for _ in range(rng.randint(n_words // 2, n_words)):
        parts += rng.choice(WORDS), rng.choice(ENDS)
    return "".join(parts)


def broken(rng, raw):
    """``raw`` after an accident: cut, with a changed byte, or with bytes that are too many."""
    accident = rng.choice(["cut", "change", "insert", "empty"])
    index = rng.randrange(len(raw) + 1)
    if accident == "cut":
        return raw[:index]
    if accident == "empty":
        return b""
    changed = bytes([rng.choice([0, 10, 13, 34, 44, 0x80, 0xFF, rng.randrange(256)])])
    return raw[:index] + changed + raw[index + (accident == "change") :]


MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


def text_in(raw):
    """The text of a file, or an error."""
    mark = next((mark for mark in MARKS if raw.startswith(mark)), b"")
    try:
        text = raw[len(mark) :].decode(MARKS.get(mark, "utf-8"))
    except UnicodeDecodeError:
        return ERROR
    return ERROR if "\0" in text else text


def fields_in(rows, field="text"):
    """The documents of the rows of a table or of lines of JSON, without blank ones."""
    texts = []
    for row in rows:
        text = row.get(field) if isinstance(row, dict) else None
        if not isinstance(text, str) or "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            return ERROR
        texts.append(text)
    return [text for text in texts if text.strip()]


def lines_in(raw):
    text = text_in(raw)
    if text == ERROR:
        return ERROR
    try:
        return fields_in(json.loads(line) for line in text.split("\n") if line.strip())
    except (ValueError, RecursionError):
        return ERROR


def csv_rows_in(raw, delimiter, is_strict):
    """The cells of the text column as Python's reader has them; an error for a row of too many cells."""
    text = text_in(raw)
    if text == ERROR:
        return ERROR
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=is_strict)
    try:
        rows = [row for row in reader if row]
    except csv.Error:
        return ERROR
    if not rows or "text" not in rows[0] or any(len(row) > len(rows[0]) for row in rows):
        return ERROR
    column = rows[0].index("text")
    cells = [row[column] if column < len(row) else "" for row in rows[1:]]
    return [cell for cell in cells if cell.strip()]


class RandomFile:
    """A file in a folder, with what it holds: a text, a list of documents, ids, or an error."""

    def __init__(self, rng, kinds):
        self.kind = rng.choice(kinds)
        self.siblings = {}
        self.is_broken = rng.random() < 0.3
        self.ending = ""
        self.may_fail = False
        if self.kind in ID_KINDS:
            self.make_ids(rng)
        elif self.kind in TEXT_KINDS:
            self.make_text(rng)
        elif self.kind in LINE_KINDS:
            self.make_lines(rng)
        else:
            self.make_table(rng)

    @property
    def suffix(self):
        return self.kind.replace(".idx", "").replace(".header", "") + self.ending

    def make_text(self, rng):
        encoding = rng.choice(["utf-8", "utf-8", "utf-8-sig", "utf-16"])
        self.raw = random_text(rng).encode(encoding)
        if self.is_broken:
            self.raw = broken(rng, self.raw)
        self.content = text_in(self.raw)
        self.pack(rng)

    def make_lines(self, rng):
        is_ascii = rng.random() < 0.5
        lines = []
        for number in range(rng.randint(2, 6)):
            row = {"text": random_text(rng, 12), "id": number}
            lines.append(json.dumps(row, ensure_ascii=is_ascii))
        self.raw = rng.choice(["\n", "\n\n", "\r\n"]).join(lines).encode()
        if self.is_broken:
            self.raw = broken(rng, self.raw)
        self.content = lines_in(self.raw)
        self.pack(rng)

    def make_table(self, rng):
        columns = rng.choice([("id", "text"), ("text",), ("", "text"), ("text", "id", "body")])
        rows = []
        for number in range(rng.randint(2, 6)):
            row = dict.fromkeys(columns, str(number))
            row["text"] = random_text(rng, 12)
            rows.append(row)
        self.content = [row["text"] for row in rows]
        if self.kind in (".csv", ".tsv"):
            delimiter = "\t" if self.kind == ".tsv" else rng.choice(",;\t")
            file = io.StringIO()
            writer = csv.writer(file, delimiter=delimiter, lineterminator=rng.choice(["\n", "\r\n"]))
            writer.writerows([list(rows[0]), *(row.values() for row in rows)])
            self.raw = file.getvalue().encode()
            # Without a delimiter in the first row, a comma in another one is taken for it.
            self.may_fail = self.kind == ".csv" and len(columns) == 1 and delimiter != ","
            if self.is_broken:
                self.raw = broken(rng, self.raw)
                self.content = csv_rows_in(self.raw, delimiter, is_strict=False)
                # Quotes at wrong places may be read or refused.
                self.may_fail |= csv_rows_in(self.raw, delimiter, is_strict=True) == ERROR
        elif self.kind == ".json":
            self.raw = json.dumps(rows, indent=rng.choice([None, 1])).encode()
        else:
            self.raw = arrow_table(rows, self.kind)
        if self.is_broken and self.kind in (".json", ".parquet", ".arrow"):
            # Only a file that is cut is an error for certain.
            self.raw = self.raw[: rng.randrange(len(self.raw) // 2)]
            self.content = ERROR
            # Without a brace, it could be the text "[".
            if self.kind == ".json" and b"{" not in self.raw:
                self.content = self.raw.decode()
                self.may_fail = True
        self.pack(rng)

    def make_ids(self, rng):
        ids = np.array([rng.randrange(1, N_IDS) for _ in range(rng.randint(60, 200))])
        widths = {".uint32.bin": "<u4", ".uint64.bin": "<u8"}
        dtype = widths.get(self.kind, "<u2")
        self.content = [ids]
        self.raw = ids.astype(dtype).tobytes()
        sizes = [20, len(ids) - 20]
        if self.kind == ".npy":
            self.raw = saved(ids.astype(rng.choice(["u2", "u4", "i8"])))
        elif self.kind == ".header.bin":
            self.raw = np.array([20240520, 1, len(ids), *([0] * 253)], "<i4").tobytes() + self.raw
        elif self.kind == ".idx.bin":
            head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\x08" + (2).to_bytes(8, "little")
            numbers = [np.array(sizes, "<i4"), np.array([0, 40], "<i8"), np.array([0, 1, 2], "<i8")]
            self.siblings[".idx"] = head + (3).to_bytes(8, "little") + b"".join(a.tobytes() for a in numbers)
            self.content = np.split(ids, [20])
        elif self.kind == ".ds":
            self.siblings[".ds.index"] = np.cumsum(sizes).astype("<u8").tobytes()
            self.content = np.split(ids, [20])
        if not self.is_broken:
            return
        if self.siblings and rng.random() < 0.5:
            [name] = self.siblings
            self.siblings[name] = self.siblings[name][: rng.randrange(len(self.siblings[name]))]
            self.content = ERROR
        elif self.siblings or self.kind in (".npy", ".header.bin"):
            self.raw = self.raw[: rng.randrange(len(self.raw))]
            # Without its index or its header, any bytes are ids.
            is_bare = self.kind == ".header.bin" and len(self.raw) < 1024
            self.content = None if is_bare else ERROR
        else:
            self.raw = self.raw[: rng.randrange(len(self.raw))]
            width = np.dtype(dtype).itemsize
            whole = np.frombuffer(self.raw[: len(self.raw) // width * width], dtype).astype(np.int64)
            self.content = ERROR if len(self.raw) % width or not len(whole) else [whole]

    def pack(self, rng):
        """Compress the file, perhaps in two parts, perhaps not completely."""
        if rng.random() < 0.7:
            return
        self.ending = rng.choice([*COMPRESSORS, ".zip"])
        if self.ending == ".zip":
            file = io.BytesIO()
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("inside", self.raw)
            self.raw = file.getvalue()
        else:
            compress = COMPRESSORS[self.ending]
            middle = rng.randrange(len(self.raw) + 1)
            self.raw = compress(self.raw[:middle]) + compress(self.raw[middle:])
        if rng.random() < 0.2:
            self.raw = self.raw[: len(self.raw) - rng.randint(1, 8)]
            self.content = ERROR


def arrow_table(rows, kind):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(rows)
    file = io.BytesIO()
    if kind == ".parquet":
        parquet.write_table(table, file)
    else:
        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return file.getvalue()
