"""What people read in a terminal or a report: numbers with their nouns, and text that fits and is safe."""

import unicodedata


def counted(number: int, noun: str) -> str:
    """The number with its ``noun``, whose plural ends in s: "1 document", "2,000 documents"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def duration(seconds: float) -> str:
    """Seconds in words: "90 s", "12 min", "3.5 h"."""
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"


def printable(text: str) -> str:
    """``text`` without control characters other than line breaks, which could write to a terminal at will."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def fitting(text: str, columns: int) -> str:
    """The beginning of ``text`` that a terminal shows in this many ``columns``; some characters take two."""
    for end, character in enumerate(text):
        columns -= 1 + (unicodedata.east_asian_width(character) in "WF")
        if columns < 0:
            return text[:end]
    return text
