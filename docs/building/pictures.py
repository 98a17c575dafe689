"""The pictures of the first pages, as SVG that follows the light or dark page that shows it.

``python -m docs.building.pictures`` writes them into docs/images. They are drawn without matplotlib, whose
SVG can't move, and has the colours of one page only.
"""

import html
from collections.abc import Callable, Sequence

from docs.building.drawings import SEGMENT, Cell, compressed, exactly, rolled
from docs.building.source import ROOT
from memformers.report.markdown import DARK
from memformers.report.plotting import BLUE, GREEN, ORANGE

WIDTH = 720
IMAGES = ROOT / "docs/images"
LIGHT = {
    "page": "#ffffff", "ink": "#1f2328", "faint": "#59636e", "grid": "#d8dde2", "forgotten": "#e4e7ea",
    "segment": BLUE["color"].lower(), "memory": ORANGE["color"].lower(), "slots": GREEN["color"].lower(),
}  # fmt: skip
ON_DARK = {"page": DARK["#ffffff"], "ink": "#e3e3e3", "faint": "#aab2bb", "grid": "#3a3f45",
           "forgotten": "#33383e"}  # fmt: skip
CLASS = {"compressed memory": "slots", "memory": "memory", "segment": "segment", "forgotten": "forgotten"}
RATE = 4
SECONDS_A_STEP = 3


def picture(height: int, title: str, about: str, drawn: Sequence[str], css: str = "") -> str:
    """An SVG whose colours are variables, with words for those who can't see it."""
    dark = {name: ON_DARK.get(name) or DARK[colour] for name, colour in LIGHT.items()}
    light_css, dark_css = (
        "svg{" + "".join(f"--{n}:{c};" for n, c in colours.items()) + "}" for colours in (LIGHT, dark)
    )
    fills = "".join(f".{name}{{fill:var(--{name})}}" for name in LIGHT)
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-labelledby="t d">',
        f'<title id="t">{html.escape(title)}</title><desc id="d">{html.escape(about)}</desc>',
        f"<style>{light_css}@media (prefers-color-scheme:dark){{{dark_css}}}{fills}"
        "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
        ".bold{font-weight:600}.small{font-size:12px}.large{font-size:17px;font-weight:600}"
        ".middle{text-anchor:middle}.end{text-anchor:end}"
        f".line{{fill:none;stroke-width:1.2;stroke:var(--faint)}}{css}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>',
        *drawn,
        "</svg>\n",
    ))  # fmt: skip


def words(x: float, y: float, said: object, kind: str = "ink") -> str:
    """A text at its baseline; ``kind`` has its colour, its size and where it is anchored."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{html.escape(str(said))}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width - 3:g}" height="{height:g}" rx="3" class="{kind}"/>'


def path(points: Sequence[tuple[float, float]], kind: str = "line", end: str = "") -> str:
    return f'<path d="M{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}{end}" class="{kind}"/>'


def legend(y: float, items: Sequence[tuple[float, str, str]]) -> list[str]:
    return [
        part for x, kind, said in items for part in (box(x, y, 19, 16, kind), words(x + 22, y + 13, said))
    ]


def equal_keys() -> str:
    """How far back one layer of each model looks before its segment, with the same number of keys."""
    left, pitch, height, apart, segments = 158, 22.6, 36, 68, 6
    memories = {"No memory": exactly(0), "Transformer-XL": exactly(8), "Compressive": compressed(4, 4, RATE)}
    drawn = [words(16, 30, "The same number of keys, farther back", "ink large")]
    drawn.append(words(WIDTH - 16, 30, "one layer, and what it can look at", "faint end"))
    spoken = []
    for number, (name, remember) in enumerate(memories.items()):
        y = 54 + apart * number
        row = rolled(remember, segments)[-1]
        now = (segments - 1) * SEGMENT
        keys = [cell for cell in row if cell[2] in ("memory", "compressed memory")]
        reach = now - keys[0][0] if keys else 0
        for first, last, place in row:
            drawn.append(box(left + pitch * first, y, pitch * (last - first + 1), height, CLASS[place]))
        for count, (first, last, _) in enumerate(keys, 1):
            middle = left + pitch * (first + last + 1) / 2 - 1.5
            drawn.append(words(middle, y + 23, count, "page bold middle"))
        drawn += [words(left - 12, y + 16, name, "ink bold end")]
        drawn.append(words(left - 12, y + 32, f"{len(keys)} keys of memory", "faint small end"))
        begin, end = left + pitch * (now - reach), left + pitch * now - 3
        said = f"reach: {reach} positions"
        if reach:
            y_line, half = y + height + 10, 60
            for edge, inner in ((begin, (begin + end) / 2 - half), (end, (begin + end) / 2 + half)):
                drawn.append(path([(edge, y_line - 5), (edge, y_line + 5)]))
                drawn.append(path([(edge, y_line), (inner, y_line)]))
            drawn.append(words((begin + end) / 2, y_line + 4, said, "ink small middle"))
        else:
            drawn.append(words(end, y + height + 14, said, "ink small end"))
        spoken.append(f"{name}: {len(keys)} keys, {said}.")
    y = 54 + apart * len(memories) + 6
    drawn.append(path([(left, y), (WIDTH - 24, y)], end="m-7,-4l7,4l-7,4"))
    drawn.append(words(left, y + 17, "oldest token", "faint small"))
    drawn.append(words(WIDTH - 24, y + 17, "newest token", "faint small end"))
    meaning = [
        (16, "segment", "segment: read now"),
        (172, "memory", "position: kept exactly"),
        (346, "slots", f"slot: {RATE} positions in one key"),
        (560, "forgotten", "forgotten"),
    ]
    return picture(
        y + 62, "The same number of keys, farther back", " ".join(spoken), [*drawn, *legend(y + 34, meaning)]
    )


def belt() -> str:
    """Six steps of the Compressive Transformer: tokens enter, are kept, merge into slots, are forgotten."""
    rows, columns = rolled(compressed(4, 2, RATE)), 2 + 4 + SEGMENT
    left, top, pitch, height = 62, 58, 60, 46
    tokens = [(p, p) for p in range(len(rows) * SEGMENT)]
    slots = sorted({cell[:2] for row in rows for cell in row if cell[2] == "compressed memory"})
    css, drawn = [], []
    for number, (first, last) in enumerate([*tokens, *slots]):
        steps = [where(row, first, last, columns) for row in rows]
        formed = next((step for step in steps if step and step[2]), None)
        if (first, last) in slots and formed:
            steps = [step or (formed[0], "slots", 0) for step in steps]
        outside = columns + first % SEGMENT, "segment", 0
        stated = [
            f"transform:translate({left + pitch * c:g}px,{top}px);color:var(--{kind});opacity:{seen}"
            for c, kind, seen in (step or outside for step in [None if first == last else steps[0], *steps])
        ]
        css.append(moving(f"i{number}", stated))
        said = first + 1 if first == last else f"{first + 1}–{last + 1}"
        drawn.append(f'<g id="i{number}" class="moves">{box(0, 0, pitch, height, "own")}')
        drawn.append(words(pitch / 2 - 1.5, 28, said, "page bold middle") + "</g>")
    zones = [(0, 2, "slots", f"slots: {RATE} positions each"), (2, 4, "memory", "positions: kept exactly"),
             (6, SEGMENT, "segment", "segment: read now")]  # fmt: skip
    for at, many, kind, said in zones:
        x = left + pitch * at
        drawn.append(box(x, top + height + 9, pitch * many, 4, kind))
        drawn.append(words(x, top + height + 31, said.split(":")[0], "ink bold"))
        drawn.append(words(x, top + height + 48, said.split(": ")[1], "faint small"))
    descriptions = [describe_step(row, number) for number, row in enumerate(rows, 1)]
    for number, line in enumerate(descriptions):
        shown = [f"opacity:{int(step == number)}" for step in range(len(rows))]
        css.append(moving(f"s{number}", [shown[0], *shown], share_moving=0.01))
        drawn.append(f'<g id="s{number}" class="moves">{words(16, 32, line, "ink large")}</g>')
    seconds = SECONDS_A_STEP * len(rows)
    css.append(
        f".own{{fill:currentColor}}.moves{{animation-duration:{seconds}s;animation-iteration-count:infinite;"
        "animation-timing-function:ease-in-out}@media (prefers-reduced-motion:reduce){.moves{animation:none}}"
    )
    return picture(
        top + height + 64, "How compressed memory moves", " ".join(descriptions), drawn, "".join(css)
    )


def where(row: Sequence[Cell], first: int, last: int, columns: int) -> tuple[float, str, int] | None:
    """The column, colour and opacity of these positions in a ``row``; None for those that it has not yet."""
    keys = [cell for cell in row if cell[2] != "forgotten"]
    for column, (begin, end, place) in enumerate(keys, columns - len(keys)):
        if begin <= first and last <= end:
            return column, CLASS[place], 1
    return (-1, "slots", 0) if last < keys[0][0] else None


def moving(name: str, stated: Sequence[str], share_moving: float = 0.3) -> str:
    """CSS that begins in the first of these states, goes to each other one and rests there; without motion,
    the last one."""
    begin, *others = stated
    share = 100 / len(others)
    rests = "".join(
        f"{share * (n + share_moving):.1f}%,{share * (n + 1):.1f}%{{{state}}}"
        for n, state in enumerate(others)
    )
    return f"#{name}{{{stated[-1]};animation-name:{name}}}@keyframes {name}{{0%{{{begin}}}{rests}}}"


def describe_step(row: Sequence[Cell], number: int) -> str:
    places = [place for _, _, place in row]
    slots = [(first, last) for first, last, place in row if place == "compressed memory"]
    if "forgotten" in places:
        said = "The oldest slot is forgotten: the number of keys stays the same."
    elif slots:
        said = f"The oldest {RATE} positions merge into one slot."
    elif "memory" in places:
        said = "They become memory, and the next tokens enter."
    else:
        said = f"{SEGMENT} tokens enter."
    return f"{number}. {said}"


PICTURES: dict[str, Callable[[], str]] = {"equal_keys": equal_keys, "belt": belt}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw(), "utf-8")
