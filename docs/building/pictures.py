"""The pictures of the first pages, as SVG that follows the light or dark page that shows it.

``python -m docs.building.pictures`` writes them into docs/images. They are drawn without matplotlib, whose
SVG can't move, and has the colours of one page only.
"""

import html
from collections.abc import Callable, Sequence

from docs.building.drawings import SEGMENT, Cell, compressed, exactly, rolled
from docs.building.results import ROOT
from memformers.report.markdown import DARK
from memformers.report.plotting import BLUE, GREEN, ORANGE

WIDTH = 720
IMAGES = ROOT / "docs/images"
LIGHT = {
    "page": "#ffffff", "ink": "#1f2328", "faint": "#59636e", "grid": "#d8dde2", "forgotten": "#e4e7ea",
    "segment": BLUE["color"].lower(), "memory": ORANGE["color"].lower(), "slots": GREEN["color"].lower(),
}  # fmt: skip
ON_DARK = {"ink": "#e3e3e3", "faint": "#aab2bb", "grid": "#3a3f45", "forgotten": "#33383e"}
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


def words(x: float, y: float, text: object, kind: str = "ink") -> str:
    """A text at its baseline; ``kind`` has its colour, its size and where it is anchored."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{html.escape(str(text))}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width - 3:g}" height="{height:g}" rx="3" class="{kind}"/>'


def kind_of(place: str) -> str:
    return place.replace("compressed memory", "slots")


def equal_keys() -> str:
    """How far back one layer of each model looks before its segment, with the same number of keys."""
    left, pitch, height, apart, now = 158, 22.6, 36, 68, 5 * SEGMENT
    memories = {"No memory": exactly(0), "Transformer-XL": exactly(8), "Compressive": compressed(4, 4, RATE)}
    drawn = [words(16, 30, "The same number of keys, farther back", "ink large")]
    drawn.append(words(WIDTH - 16, 30, "one layer, and what it can look at", "faint end"))
    spoken, end, y = [], left + pitch * now - 3, 54
    for name, remember in memories.items():
        row = rolled(remember, now // SEGMENT + 1)[-1]
        keys = [cell for cell in row if "memory" in cell[2]]
        reach = now - keys[0][0] if keys else 0
        for first, last, place in row:
            drawn.append(box(left + pitch * first, y, pitch * (last - first + 1), height, kind_of(place)))
        for count, (first, last, _) in enumerate(keys, 1):
            middle = left + pitch * (first + last + 1) / 2 - 1.5
            drawn.append(words(middle, y + 23, count, "page bold middle"))
        drawn += [words(left - 12, y + 16, name, "ink bold end")]
        drawn.append(words(left - 12, y + 32, f"{len(keys)} keys of memory", "faint small end"))
        text, begin = f"reach: {reach} positions", left + pitch * (now - reach)
        if reach:
            side = (end - begin) / 2 - 60
            for edge, inward in ((begin, side), (end, -side)):
                drawn.append(f'<path d="M{edge:.1f},{y + height + 5}v10m0,-5h{inward:.1f}" class="line"/>')
            drawn.append(words((begin + end) / 2, y + height + 14, text, "ink small middle"))
        else:
            drawn.append(words(end, y + height + 14, text, "ink small end"))
        spoken.append(f"{name}: {len(keys)} keys, {text}.")
        y += apart
    drawn.append(f'<path d="M{left},{y + 6}H{WIDTH - 24}m-7,-4l7,4l-7,4" class="line"/>')
    drawn.append(words(left, y + 23, "oldest token", "faint small"))
    drawn.append(words(WIDTH - 24, y + 23, "newest token", "faint small end"))
    for x, kind, meaning in (
        (16, "segment", "segment: read now"), (172, "memory", "position: kept exactly"),
        (346, "slots", f"slot: {RATE} positions in one key"), (560, "forgotten", "forgotten"),
    ):  # fmt: skip
        drawn += [box(x, y + 40, 19, 16, kind), words(x + 22, y + 53, meaning)]
    return picture(y + 68, "The same number of keys, farther back", " ".join(spoken), drawn)


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
        states = [
            f"transform:translate({left + pitch * c:g}px,{top}px);color:var(--{kind});opacity:{seen}"
            for c, kind, seen in (step or outside for step in [None if first == last else steps[0], *steps])
        ]
        css.append(moving(f"i{number}", states))
        text = first + 1 if first == last else f"{first + 1}–{last + 1}"
        drawn.append(f'<g id="i{number}" class="moves">{box(0, 0, pitch, height, "own")}')
        drawn.append(words(pitch / 2 - 1.5, 28, text, "page bold middle") + "</g>")
    for at, many, kind, name, meaning in (
        (0, 2, "slots", "slots", f"{RATE} positions each"), (2, 4, "memory", "positions", "kept exactly"),
        (6, SEGMENT, "segment", "segment", "read now"),
    ):  # fmt: skip
        x = left + pitch * at
        drawn.append(box(x, top + height + 9, pitch * many, 4, kind))
        drawn.append(words(x, top + height + 31, name, "ink bold"))
        drawn.append(words(x, top + height + 48, meaning, "faint small"))
    descriptions = [f"{number}. {what_happens(row)}" for number, row in enumerate(rows, 1)]
    for number, line in enumerate(descriptions):
        shown = [f"opacity:{int(step == number)}" for step in range(len(rows))]
        css.append(moving(f"s{number}", [shown[0], *shown], share_moving=0.01))
        drawn.append(f'<g id="s{number}" class="moves">{words(16, 32, line, "ink large")}</g>')
    css.append(
        f".own{{fill:currentColor}}.moves{{animation-duration:{SECONDS_A_STEP * len(rows)}s;"
        "animation-iteration-count:infinite;animation-timing-function:ease-in-out}"
        "@media (prefers-reduced-motion:reduce){.moves{animation:none}}"
    )
    title = "How compressed memory moves"
    return picture(top + height + 64, title, " ".join(descriptions), drawn, "".join(css))


def where(row: Sequence[Cell], first: int, last: int, columns: int) -> tuple[float, str, int] | None:
    """The column, colour and opacity of these positions in a ``row``; None for those that it has not yet."""
    keys = [cell for cell in row if cell[2] != "forgotten"]
    for column, (begin, end, place) in enumerate(keys, columns - len(keys)):
        if begin <= first and last <= end:
            return column, kind_of(place), 1
    return (-1, "slots", 0) if last < keys[0][0] else None


def moving(name: str, states: Sequence[str], share_moving: float = 0.3) -> str:
    """CSS that begins in the first of these states, goes to each other one and rests there; without motion,
    the last one."""
    share = 100 / (len(states) - 1)
    rests = "".join(
        f"{share * (n + share_moving):.1f}%,{share * (n + 1):.1f}%{{{state}}}"
        for n, state in enumerate(states[1:])
    )
    return f"#{name}{{{states[-1]};animation-name:{name}}}@keyframes {name}{{0%{{{states[0]}}}{rests}}}"


def what_happens(row: Sequence[Cell]) -> str:
    places = {place for _, _, place in row}
    if "forgotten" in places:
        return "The oldest slot is forgotten: the number of keys stays the same."
    if "compressed memory" in places:
        return f"The oldest {RATE} positions merge into one slot."
    if "memory" in places:
        return "They become memory, and the next tokens enter."
    return f"{SEGMENT} tokens enter."


PICTURES: dict[str, Callable[[], str]] = {"equal_keys": equal_keys, "belt": belt}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw(), "utf-8")
