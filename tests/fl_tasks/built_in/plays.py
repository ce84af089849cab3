"""A small text in the form of tiny Shakespeare, with three speakers who are clients and one who is not."""

from __future__ import annotations

from pathlib import Path

LINES = {
    "ROMEO": "But, soft! what light through yonder window breaks?\nIt is the east, and Juliet is the sun.",
    "JULIET": "O Romeo, Romeo! wherefore art thou Romeo?\nDeny thy father and refuse thy name;",
    "Nurse": "Even or odd, of all days in the year,\nCome Lammas-eve at night shall she be fourteen.",
    "PETER": "Anon!",
}
"""Speaker -> one speech."""


def write_play(data_root: Path, repeats: int = 30) -> str:
    """Write `repeats` rounds of the speeches below a data folder. Returns the folder as an option."""
    folder = data_root / "tinyshakespeare"
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(f"{speaker}:\n{speech}" for _ in range(repeats) for speaker, speech in LINES.items())
    (folder / "input.txt").write_text(f"{text}\n", encoding="utf-8")
    return str(data_root)
