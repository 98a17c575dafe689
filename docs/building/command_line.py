"""The pages of the command line, one for each command, from what it answers to ``--help``."""

import contextlib
import io
import os
import re
import warnings
from html import escape
from unittest.mock import patch

from memformers.cli import ABOUT, COMMANDS, main

WIDTH = "100"
"""Characters in a line of the help: few enough for its boxes to be one below the other."""
BOX = re.compile(r"^╭─ (.+?) ─+╮\n(.*?)^╰─+╯$", re.MULTILINE | re.DOTALL)
ENDING = re.compile(r"\s*\((default: .*|required)\)$")
INTRODUCTION = f"""# The command line

{ABOUT}
`memformers COMMAND --help` prints what its page shows; `memformers --version` prints the version.

Tab can complete commands and options. In bash (or zsh, or tcsh, with its name):

```bash
memformers --tyro-print-completion bash > ~/.memformers-completion && source ~/.memformers-completion
```

| command | what it does |
|---|---|
"""


def command_pages() -> dict[str, str]:
    """The pages in Markdown, by their paths: the list of all commands first, then each with its options in
    the order of its help."""
    rows = [f"| [`{name}`](commands/{name}.md) | {summary} |" for name, summary in COMMANDS.items()]
    pages = {f"commands/{name}.md": page_of(name, help_of(name)) for name in COMMANDS}
    return {"command-line.md": INTRODUCTION + "\n".join(rows) + "\n", **pages}


def help_of(command: str) -> str:
    """What ``memformers COMMAND --help`` prints; ValueError if it fails."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # a plain StringIO gets no boxes
    with (
        patch.dict(os.environ, {"COLUMNS": WIDTH}),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(printed),
    ):
        try:
            main([command, "--help"])
        except SystemExit as end:
            if end.code:
                raise ValueError(f"memformers {command} --help ended with {end.code}.") from None
    printed.seek(0)
    return printed.read()


def page_of(command: str, text: str) -> str:
    # Above the first box: the usage, what the command does, and the options that most people use
    summary_text, _, _ = text.partition("╭")[0].partition("\n\nMost used")
    usage, _, about = summary_text.partition("\n\n")
    joined = " ".join(about.split())  # lines are wrapped
    summary, *examples = map(str.strip, joined.split("Example: "))
    lines = escape("\n".join([usage.strip(), *examples]))
    # HTML, since Markdown would read options as markup
    parts = [f"# memformers {command}", f"<p>{escape(summary)}</p>", f"<pre><code>{lines}</code></pre>"]
    # A box is a group of options, below what the group is about.
    for title, box in BOX.findall(text):
        body = "\n".join(line[2:-1].rstrip() for line in box.splitlines())
        about_box, _, options = body.rpartition("─\n")
        parts.append(f"## {title}")
        if about_box:
            parts.append(f"<p>{escape(' '.join(about_box.rstrip('─').split()))}</p>")
        entries = [entry(option) for option in re.split(r"\n(?=\S)", options) if option.strip()]
        parts.append("\n".join(['<dl class="options">', *entries, "</dl>"]))
    return "\n\n".join(parts) + "\n"


def entry(option: str) -> str:
    """An option with what it takes, its default and its meaning, in HTML: in Markdown, what is in the help
    could mean something else."""
    names, *rest = re.split(r" {2,}|\n", option, maxsplit=1)
    meaning = " ".join(" ".join(rest).split())
    default = ENDING.search(meaning)
    value = f" <span>{escape(default[1])}</span>" if default else ""
    anchor = names.split(",")[0].split()[0].lstrip("-")
    head = f'<dt id="{anchor}"><code>{escape(names)}</code>{value}</dt>'
    return f"{head}\n<dd>{escape(ENDING.sub('', meaning))}</dd>"
