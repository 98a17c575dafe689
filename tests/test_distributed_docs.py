"""The command lines of docs/distributed.md, as torchrun and the command read them."""

import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from memformers.commands.train import Train, parse_train

DOCS = Path(__file__).parents[1] / "docs"
LINES = [
    line[line.index("torchrun") :]
    for page in (DOCS / "distributed.md", DOCS.parent / "README.md")
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for line in block.splitlines()
    if "torchrun --" in line
]


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_can_be_read(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = get_args_parser().parse_args(shlex.split(line)[1:])
    assert (started.module, started.training_script) == (True, "memformers.cli")
    command, *arguments = started.training_script_args
    train = parse_train(arguments, Train())
    assert command == "train"
    assert train.config.parallel in ("ddp", "fsdp")
    processes = int(started.nproc_per_node)
    assert train.config.batch_size % processes == 0


def test_all_lines_are_found():
    assert len(LINES) == 5


@pytest.mark.parametrize("name", ["distributed.md", "scaling.md"])
def test_every_file_that_a_page_links_to_is_there(name):
    links = re.findall(r"\]\((?!http|#)([^)]+)\)", (DOCS / name).read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert (DOCS / link).exists(), link
