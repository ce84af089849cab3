"""The largest stable step of FedCM over a buffer, for one parabola and updates that are all equally stale.

    python -m benchmarks.stale_momentum

With f(x) = x^2 / 2, short local training, a weight of 1 and the staleness t, step v with `stale_direction`

    current d = (1 - alpha) Delta_v     + alpha x_{v-t}         (the direction of the current version)
    sent    d = (1 - alpha) Delta_{v-t} + alpha x_{v-t}         (the deltas as they are)
            x_{v+1} = x_v - h d,  Delta_{v+1} = d,              h = eta K times the curvature
"""

from __future__ import annotations

import sys

from benchmarks.table import markdown

STEPS, HALVINGS, LARGEST = 4000, 30, 60.0


def stable(h: float, alpha: float, staleness: int, *, sent: bool) -> bool:
    """Whether x comes nearer to 0 in the long run."""
    x, Delta = [1.0] * (staleness + 2), [0.0] * (staleness + 2)
    for _ in range(STEPS):
        kept = Delta[-1 - staleness] if sent else Delta[-1]
        d = (1.0 - alpha) * kept + alpha * x[-1 - staleness]
        Delta.append(d)
        x.append(x[-1] - h * d)
        if abs(x[-1]) > 1e6:
            return False
    return abs(x[-1]) < abs(x[-STEPS // 2])


def largest(alpha: float, staleness: int, *, sent: bool) -> float:
    """The largest stable h, by halving."""
    low, high = 0.0, LARGEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle, alpha, staleness, sent=sent) else (low, middle)
    return low


def main() -> None:
    """Print the table."""
    rows = [
        {"alpha": alpha, "staleness": t, **{form: f"{largest(alpha, t, sent=form == 'sent'):.2f}" for form in FORMS}}
        for alpha in (0.1, 0.3)
        for t in range(5)
    ]
    sys.stdout.writelines(f"{line}\n" for line in markdown(rows))


FORMS = ("current", "sent")


if __name__ == "__main__":
    main()
