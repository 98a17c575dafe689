#!/bin/sh
# pyarrow 26.0.1, datasets 5.2.0: Table.from_pylist and Dataset.from_list drop keys that the first record lacks.
#
# Records of texts differ in their fields: a title, a language or a label that only some have. If the first record lacks
# it, the column is missing, without an error; if the first has it, records without it get None. The same records as
# lines of JSON, or by pyarrow.array, keep every field, and a shuffled list has other columns.
# Guess: the columns are those of all records, with None where a record lacks one.
# Output seen: {'text': 'a'}, {'text': 'b', 'title': 't'}: from_pylist text; from_list text; array text title; JSON text
# title; reversed: from_pylist text title; from_list text title
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile pyarrow==26.0.1 datasets==5.2.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import io
import json

import pyarrow as pa
import pyarrow.json
from datasets import Dataset

RECORDS = [{"text": "a"}, {"text": "b", "title": "t"}]
lines = "\n".join(map(json.dumps, RECORDS)).encode()
names = {
    "from_pylist": pa.Table.from_pylist(RECORDS).column_names,
    "from_list": Dataset.from_list(RECORDS).column_names,
    "array": [field.name for field in pa.array(RECORDS).type],
    "JSON": pyarrow.json.read_json(io.BytesIO(lines)).column_names,
}
reversed_names = {
    "from_pylist": pa.Table.from_pylist(RECORDS[::-1]).column_names,
    "from_list": Dataset.from_list(RECORDS[::-1]).column_names,
}


def shown(columns):
    return "; ".join(f"{name} {' '.join(values)}" for name, values in columns.items())


print(f"{', '.join(map(str, RECORDS))}: {shown(names)}; reversed: {shown(reversed_names)}")
assert names["from_pylist"] == names["from_list"] == ["text"]
assert names["array"] == names["JSON"] == ["text", "title"]
assert reversed_names["from_pylist"] == reversed_names["from_list"] == ["text", "title"]
PYTHON
