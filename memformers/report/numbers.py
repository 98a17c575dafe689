"""Numbers as text."""

import math
import re

from memformers.common.intervals import Mean

DASH = "–"
"""Of a number that there isn't."""


def number(
    value: Mean | float | None, form: str, unit: str = "", *, scale: float = 1.0, signed: bool = False
) -> str:
    """``value · scale`` in the format ``form``, with its interval if it has one; a dash for None."""
    if value is None:
        return DASH
    interval = ""
    mean = value.mean if isinstance(value, Mean) else value
    if isinstance(value, Mean) and not math.isnan(value.half_width):
        interval = f" ± {scale * value.half_width:{form}}"
    shown = f"{scale * mean:{'+' if signed else ''}{form}}"
    if not set(shown) & set("123456789"):  # no negative zero
        shown = shown.replace("-", "+" if signed else "")
    return f"{shown}{interval}{unit}".replace("-", "−")


def unbroken(text: str) -> str:
    """No line ends within Transformer-XL or C = 64, or between a number and its interval or unit."""
    text = re.sub(r"(?<=[a-z])-(?=[A-Z]{2}\b)", "-\N{WORD JOINER}", text)
    spaces = r" ± |(?<=\b\w) = (?=\d)|(?<=\d) (?=(?:s|MiB)\b|%)"
    return re.sub(spaces, lambda match: match[0].replace(" ", "\xa0"), text)
