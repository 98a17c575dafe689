#!/bin/sh
# datasets 5.2.0, pyarrow 26.0.1: a text column of JSON lines becomes datetimes if all of its texts look like dates.
#
# pyarrow's JSON reader, which datasets uses, infers a timestamp for strings such as "2024-01-02" or "2024-01-02
# 10:00", if a block has no others: the text is then a datetime.datetime. Features that declare the column as
# strings come too late: the timestamp is written as a string again, so that "2024-01-02" becomes another text. One
# more text in the block that is no date keeps all of them.
# Guess: what JSON quotes is a string, at least where features say so.
# Output seen: "2024-01-02" is a datetime; as string "2024-01-02 00:00:00"; with one more text "2024-01-02"
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile datasets==5.2.0 pyarrow==26.0.1
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import json

from datasets import Features, Value, disable_progress_bars, load_dataset

disable_progress_bars()


def kinds(texts, features=None):
    with open("texts.jsonl", "w") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    rows = load_dataset("json", data_files="texts.jsonl", split="train", features=features, cache_dir="cache")
    return [type(row["text"]).__name__ for row in rows], rows[0]["text"]


DATES = ["2024-01-02", "2024-01-02 10:00"]
alone, _ = kinds(DATES)
declared, text = kinds(DATES, Features({"text": Value("string")}))
_, kept = kinds([*DATES, "in May"])
print(f'"2024-01-02" is a {alone[0]}; as string "{text}"; with one more text "{kept}"')
assert alone == ["datetime", "datetime"], alone
assert (declared, text) == (["str", "str"], "2024-01-02 00:00:00")
assert kept == "2024-01-02"
PYTHON
