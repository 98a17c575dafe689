"""The pages of the command line, one for each command, from what it answers to ``--help-all``."""

import contextlib
import io
import os
import re
import warnings
from dataclasses import dataclass
from html import escape
from unittest.mock import patch

from memformers.cli import ABOUT, COMMANDS, main

WIDTH = "100"
"""Characters in a line of the help: few enough for its boxes to stand one below the other."""
BOX = re.compile(r"^╭─ (.+?) ─+╮\n(.*?)^╰─+╯$", re.MULTILINE | re.DOTALL)
ENDING = re.compile(r"\s*\((default: .*|required)\)$")
INTRODUCTION = f"""# The command line

{ABOUT}
`memformers COMMAND --help-all` prints the same as its page, and `memformers --version` the version.

| command | what it does |
|---|---|
"""


@dataclass(frozen=True)
class Option:
    """An option as its help shows it."""

    names: str
    """With what it takes: ``--tokens INT``."""
    meaning: str
    value: str
    """What it is if it isn't given, or that it must be given; empty for nothing."""


def command_pages() -> dict[str, str]:
    """The pages in Markdown, by their paths: the list of all commands first, then each with its options in
    the order of its help."""
    rows = [f"| [`{name}`](commands/{name}.md) | {summary} |" for name, summary in COMMANDS.items()]
    pages = {f"commands/{name}.md": page_of(name, help_of(name)) for name in COMMANDS}
    return {"command-line.md": INTRODUCTION + "\n".join(rows) + "\n", **pages}


def help_of(command: str) -> str:
    """What ``memformers COMMAND --help-all`` prints; ValueError if it fails."""
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # a plain StringIO gets no boxes
    with (
        patch.dict(os.environ, {"COLUMNS": WIDTH}),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(said),
    ):
        try:
            main([command, "--help-all"])
        except SystemExit as end:
            if end.code:
                raise ValueError(f"memformers {command} --help-all ended with {end.code}.") from None
    said.seek(0)
    return said.read()


def page_of(command: str, text: str) -> str:
    usage, _, about = text.partition("╭")[0].partition("\n\n")
    summary, *examples = (" ".join(part.split()) for part in about.split("Example: "))  # lines are wrapped
    lines = escape("\n".join([usage.strip(), *examples]))
    parts = [f"# memformers {command}", f"<p>{escape(summary)}</p>", f"<pre><code>{lines}</code></pre>"]
    for title, body in BOX.findall(text):
        said, options = entries(body)
        parts.append(f"## {title}")
        parts += [f"<p>{escape(said)}</p>"] if said else []
        parts.append("\n".join(['<dl class="options">', *map(entry, options), "</dl>"]))
    return "\n\n".join(parts) + "\n"


def entries(body: str) -> tuple[str, list[Option]]:
    """What a box of the help says of itself, and its options."""
    lines = [line[2:-1].rstrip() for line in body.splitlines()]
    rule = next((i for i, line in enumerate(lines) if line.startswith("─")), -1)
    found: list[tuple[str, list[str]]] = []
    for line in lines[rule + 1 :]:
        if line and not line.startswith(" "):
            names, *meaning = re.split(r" {2,}", line, maxsplit=1)
            found.append((names, meaning))
        elif line:
            found[-1][1].append(line)
    return " ".join(lines[: rule + 1][:-1]), [option_of(names, meaning) for names, meaning in found]


def option_of(names: str, lines: list[str]) -> Option:
    meaning = " ".join(" ".join(lines).split())
    ending = ENDING.search(meaning)
    value = ending[1] if ending else ""
    return Option(names, ENDING.sub("", meaning), value)


def entry(option: Option) -> str:
    """An option and its meaning in HTML. In Markdown, what stands in the help could mean something else."""
    name = option.names.split(",")[0].split()[0].lstrip("-")
    value = f" <span>{escape(option.value)}</span>" if option.value else ""
    return f'<dt id="{name}">{code(option.names)}{value}</dt>\n<dd>{escape(option.meaning)}</dd>'


def code(text: str) -> str:
    return f"<code>{escape(text)}</code>"
