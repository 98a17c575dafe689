"""Tables as streams of documents, as public tools write them, or one line that says what is wrong."""

import gzip
import io
import json
import tarfile

import pytest
import zstandard

from memformers.data.tables import documents_in_table
from tests.data.reading import contents, dataset, refused, whole, write

datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets isn't installed")

ROWS = [
    {"id": 3, "text": "One\u2028line", "body": "other"},
    {"id": 4, "text": "naïve\ntext", "body": "fields"},
]
TABLE = datasets.Dataset.from_list(ROWS)
LONG = datasets.Dataset.from_dict({"text": [f"Line {n} of a long story.\n" * 3 for n in range(600)]})


def csv_file(path):
    TABLE.to_csv(path)


def parquet_file(path):
    TABLE.to_parquet(path)


def json_array(path):
    path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")


def tsv_file(path):
    TABLE.to_csv(path, sep="\t")


def packed(writer, compress):
    """What ``writer`` writes, in two parts that are compressed one after the other."""

    def write_packed(path):
        plain = path.with_name(f"plain-{path.name}")
        writer(plain)
        raw = plain.read_bytes()
        plain.unlink()
        path.write_bytes(compress(raw[:1]) + compress(raw[1:]))

    return write_packed


def as_utf16(path):
    csv_file(path)
    path.write_bytes(path.read_text(encoding="utf-8").encode("utf-16"))


@pytest.mark.parametrize(
    ("name", "writer"),
    [
        ("x.csv", csv_file),
        ("x.tsv", tsv_file),
        ("x.json", json_array),
        ("x.parquet", parquet_file),
        ("x.csv.zst", packed(csv_file, zstandard.compress)),
        ("x.parquet.gz", packed(parquet_file, gzip.compress)),
        ("x.json.gz", packed(json_array, gzip.compress)),
        ("utf-16.csv", as_utf16),
    ],
)
@pytest.mark.parametrize("field", ["text", "body"])
@pytest.mark.parametrize("folder", ["", "x/"])
def test_a_row_of_a_table_is_a_document(name, writer, field, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, {folder + name: writer}))
    expected = [(f"{name}:{number}", row[field]) for number, row in enumerate(ROWS, 1)]
    assert contents(folder or name, text_field=field)[1] == expected


@pytest.mark.parametrize("line_end", ["\r", "\n", "\r\n"])
def test_a_line_of_a_csv_file_ends_as_on_any_system(line_end, tmp_path):
    """Excel's "CSV (Macintosh)" has carriage returns alone."""
    write(tmp_path, {"x.csv": line_end.join(["id,text", "3,a naïve", '4,"so, said"', ""])})
    assert [text for _, text in contents(tmp_path / "x.csv")[1]] == ["a naïve", "so, said"]


def test_cells_of_a_csv_file_are_texts_as_they_are(tmp_path):
    cells = ["1", "2.50", "NA", "null", "1e5", " padded ", "# no comment"]
    write(tmp_path, {"x.csv": "id,text\n" + "".join(f"{n},{cell}\n" for n, cell in enumerate(cells))})
    assert [text for _, text in contents(tmp_path / "x.csv")[1]] == cells


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_columns_of_a_csv_file_may_be_separated_by_other_signs(delimiter, tmp_path):
    write(tmp_path, {"x.csv": f"id{delimiter}text\r\n1{delimiter}a b\r\n2{delimiter}c\r\n"})
    assert [text for _, text in contents(tmp_path / "x.csv")[1]] == ["a b", "c"]


@pytest.mark.parametrize("header", [",text", "text,", "a,,text,"])
def test_a_column_without_a_name_is_no_obstacle(header, tmp_path):
    """As of the index that pandas writes."""
    rows = [",".join(f"{column or '7'} {n}" for column in header.split(",")) for n in (1, 2)]
    write(tmp_path, {"x.csv": "\n".join([header, *rows])})
    assert [text for _, text in contents(tmp_path / "x.csv")[1]] == ["text 1", "text 2"]


def test_cells_of_a_tsv_file_may_contain_commas(tmp_path):
    write(tmp_path, {"x.tsv": "text\nHello, world\na; b\n"})
    assert [text for _, text in contents(tmp_path / "x.tsv")[1]] == ["Hello, world", "a; b"]


def test_a_saved_folder_without_one_of_its_files_is_one_line(tmp_path):
    LONG.save_to_disk(tmp_path / "saved", num_shards=3)
    (tmp_path / "saved/data-00001-of-00003.arrow").unlink()
    with refused("has no data-00001-of-00003.arrow, which its state.json lists"):
        dataset(tmp_path / "saved")


def test_a_folder_that_datasets_saved_is_its_documents(tmp_path):
    LONG.save_to_disk(tmp_path / "saved", num_shards=3)
    # A copy that datasets keeps of what it computes.
    (tmp_path / "saved/cache-abc.arrow").write_bytes(
        (tmp_path / "saved/data-00000-of-00003.arrow").read_bytes()
    )
    data = dataset(tmp_path / "saved")
    assert whole(data) == "".join(LONG["text"])
    assert data.info.documents == 600


def test_a_folder_of_splits_that_datasets_saved_has_these_splits(tmp_path):
    splits = datasets.DatasetDict(
        train=LONG.select(range(400)),
        validation=LONG.select(range(400, 500)),
        test=LONG.select(range(500, 600)),
    )
    splits.save_to_disk(tmp_path / "saved")
    data = dataset(tmp_path / "saved")
    for split, rows in splits.items():
        assert whole(data, split) == "".join(rows["text"])


def test_a_parquet_table_is_read_in_constant_memory(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow isn't installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow isn't installed")
    pages = [f"{n} " + "a page of a story " * 200 for n in range(20_000)]
    parquet.write_table(pyarrow.table({"text": pages}), tmp_path / "x.parquet", compression="zstd")
    n_bytes = pyarrow.total_allocated_bytes()
    n_read = 0
    for _, text in documents_in_table(tmp_path / "x.parquet", "parquet", "text"):
        assert text == pages[n_read]
        assert pyarrow.total_allocated_bytes() - n_bytes < 24 << 20, "of 72 MB"
        n_read += 1
    assert n_read == len(pages)


def test_shards_of_parquet_are_splits(tmp_path):
    for name, rows in (
        ("train-00000-of-00002", range(300)),
        ("train-00001-of-00002", range(300, 500)),
        ("validation-00000-of-00001", range(500, 600)),
    ):
        LONG.select(rows).to_parquet(tmp_path / f"{name}.parquet")
    data = dataset(tmp_path)
    assert whole(data, "train") == "".join(LONG["text"][:500])
    assert whole(data, "validation") == "".join(LONG["text"][500:])


def tar_file(path):
    with tarfile.open(path, "w") as archive:
        for number, row in enumerate(ROWS):
            for suffix, content in (("txt", row["text"]), ("json", json.dumps({"id": row["id"]}))):
                member = tarfile.TarInfo(f"{number:05d}.{suffix}")
                member.size = len(content.encode())
                archive.addfile(member, io.BytesIO(content.encode()))


def test_a_tar_of_webdataset_is_read_if_its_column_is_named(tmp_path):
    write(tmp_path, {"x/0.tar": tar_file, "x/nshards.txt": "1"})
    assert [text for _, text in contents(tmp_path / "x", text_field="txt")[1]] == [
        row["text"] for row in ROWS
    ]
    with refused(r"contains no text; not text and left out: 0\.tar \(an archive\)"):
        contents(tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "content", "field", "words"),
    [
        ("x.csv", b"id,text\n1,a,x\n2,b,y\n", "text", "after row 0: Length of header .* loss of data"),
        ("x.csv", b"id,text\n1,a\n2,b,y\n", "text", "after row 0: .* Expected 2 fields in line 3, saw 3"),
        ("x.csv", b'text\na\nb\n"c\n', "text", "after row 0: .*EOF inside string starting at row 3"),
        ("x.csv", b"a\rb\nc\n", "text", r"no column 'text' in the first row, 'a'; name one"),
        ("x.csv", b"", "text", "no column 'text' in the first row, '';"),
        ("x.csv", b"text\nna\0b\n", "text", "got byte 0x00 at offset 7"),
        ("x.csv", b"text\n\xff\n", "text", r"byte 0xff at offset 5|can't decode byte 0xff"),
        ("x.csv", csv_file, "title", """no column 'title' in the first row, 'id,text,body'"""),
        ("x.parquet", parquet_file, "title", "no column 'title' among 'id', 'text', 'body'"),
        ("x.parquet", parquet_file, "id", "row 1: expected a text as 'id', got 3"),
        ("x.parquet", b"PAR1 of nothing", "text", "can't be read after row 0"),
        ("x.arrow", b"\xff\xff\xff\xff of nothing", "text", "can't be read after row 0"),
        ("x.json", b'[{"text": "a"}, {"title": "b"}]', "text", "row 2: expected a text as 'text', got None"),
        ("x.json", b'[{"text": "a"}', "text", "can't be read after row 0"),
        ("x.json", b'[{"text": "a"}, 5]', "text", "can't be read after row 0"),
        ("x.tar", b"no archive", "txt", "can't be read after row 0"),
        ("x.csv.gz", b"no archive", "text", "can't be decompressed"),
    ],
)
def test_a_table_that_cannot_be_read_is_one_line(name, content, field, words, tmp_path, capfd):
    write(tmp_path, {name: content})
    capfd.readouterr()
    with refused(words):
        contents(tmp_path / name, text_field=field)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["hf://datasets/nobody/nothing", "hf://datasets/nobody/nothing?split=train"])
def test_a_dataset_of_the_hub_that_cannot_be_reached_is_one_line(name, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with refused(r"hf://datasets/nobody/nothing"):
        contents(name)
