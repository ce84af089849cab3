"""Changes of text by its words: TOML, JSON and tokens with numbers, texts and names at their limits."""

from __future__ import annotations

import re
from random import Random

_WORD = re.compile(r'"[^"\n]*"|[\w.+-]+|[\[\]{}=,:]')
_WORDS = (
    "0", "-1", "1", "1e999", "-0.0", "nan", "inf", "-inf", "NaN", "Infinity", "-Infinity", str(2**31), str(2**63),
    str(2**64), str(-(2**63) - 1), "1" * 400, "9" * 5000, "0x" + "f" * 5000, "1e-400", "true", "false", "null", '""',
    '"x"', '"\\u0000"', '"\\ud800"', '"../../x"', '"/etc/passwd"', '"' + "x" * 5000 + '"', "[]", "{}", "[[]]",
    "[" * 3000, "{a=" * 1500, '{"a":' * 1500, "1979-05-27T07:32:00Z", "07:32:00", "1979-02-30", "[1, 2]",
    "{a = 1}", "x = 1", "[x]", "[[x]]", "a.b.c", '"a"."b"', "#", "'''", '"""', "\\", "\n", "\ufeff", "é",
)  # fmt: skip


def reworded(random: Random, text: str, changes: int) -> str:
    """The text with this many words replaced, removed, repeated or swapped."""
    for _ in range(changes):
        places = [found.span() for found in _WORD.finditer(text)]
        if not places:
            return random.choice(_WORDS)
        start, end = random.choice(places)
        draw = random.random()
        if draw < 0.6:
            word = random.choice(_WORDS)
        elif draw < 0.75:
            word = ""
        elif draw < 0.9:
            other = random.choice(places)
            word = text[other[0] : other[1]]
        else:
            word = text[start:end] * 2
        text = text[:start] + word + text[end:]
    return text


def shuffled_lines(random: Random, text: str) -> str:
    """The text with one line removed, repeated or moved."""
    lines = text.splitlines(keepends=True)
    if not lines:
        return text
    line = lines.pop(random.randrange(len(lines)))
    for _ in range(random.choice((0, 1, 2))):
        lines.insert(random.randrange(len(lines) + 1), line)
    return "".join(lines)
