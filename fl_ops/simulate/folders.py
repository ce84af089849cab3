"""The folders of simulated clients whose data is files of their own, one folder for each."""

from __future__ import annotations

from pathlib import Path

from fl_common.names import check_id
from fl_common.units import counted
from fl_ops.errors import UsageError
from fl_ops.simulate.settings import SimulationSection

_MOST_SHOWN = 3


class Folders(dict[str, Path]):
    """Folders by client id, in the order of the ids or of `simulation.names`."""


def folders_of(section: SimulationSection) -> Folders:
    """The folders that `simulation.folders` names.

    With a number of clients, each of them must have its folder. Without one, every folder that fits the pattern is a
    client, whose id stands in the place of {name}. Raises UsageError.
    """
    pattern = section.folders or ""
    if not section.clients:
        return _all_that_fit(pattern)
    folders = Folders({name: Path(pattern.format(name=name)) for name in map(section.name, range(section.clients))})
    missing = [str(folder) for folder in folders.values() if not folder.is_dir()]
    if missing:
        more = f" and {len(missing) - _MOST_SHOWN} more" if len(missing) > _MOST_SHOWN else ""
        raise UsageError(
            f"simulation.folders: expected a folder for each of {counted(len(folders), 'client')}, found no "
            f"{', '.join(missing[:_MOST_SHOWN])}{more} in {Path.cwd()}: correct folders or names; "
            "without clients, every folder that is there is a client"
        )
    return folders


def _all_that_fit(pattern: str) -> Folders:
    before, after = pattern.split("{name}")
    first, last = before.rpartition("/")[2], after.partition("/")[0]
    above = Path(before[: len(before) - len(first)] or ".")
    entries = [entry.name for entry in above.iterdir()] if above.is_dir() else []
    names = [
        entry[len(first) : len(entry) - len(last)]
        for entry in entries
        if not entry.startswith(".") and entry.startswith(first) and entry.endswith(last)
    ]
    found = {name: Path(pattern.format(name=name)) for name in sorted(filter(None, names), key=str.encode)}
    folders = Folders({name: folder for name, folder in found.items() if folder.is_dir()})
    if not folders:
        raise UsageError(f"simulation.folders: expected folders that fit {pattern!r}, found none in {Path.cwd()}")
    for name, folder in folders.items():
        try:
            check_id("a client's name", name)
        except ValueError as error:
            raise UsageError(f"simulation.folders: {error}: rename the folder {folder}") from None
    return folders
