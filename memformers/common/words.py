"""Words for people, as a terminal or a report shows them."""


def counted(number: int, noun: str) -> str:
    """The number with its ``noun``, whose plural ends in s: "1 document", "2,000 documents"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def printable(text: str) -> str:
    """``text`` without control characters other than line breaks, which could write to a terminal at will."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
