"""Released models on the disk: whole versions, and a death at any file operation."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from blake3 import blake3

from fl_client.storage.disk import PART
from fl_client.storage.release_folder import ReleaseFolder
from fl_common.released import WEIGHTS, Description, ReleasedFile
from tests.fl_client.storage.test_storage_deaths import Death, DeathAfter

NAMES = ("adapter_config.json", WEIGHTS)


def content(version: int) -> dict[str, bytes]:
    """The files of a version."""
    return {name: f"{name} {version} ".encode() * 5000 for name in NAMES}


def description(version: int) -> Description:
    """The description of these files."""
    data = b"".join(content(version).values())
    digests = {name: blake3(each).hexdigest() for name, each in content(version).items()}
    return Description(
        model="digits", version=version, run="r", round=1, task="digits", form="adapter",
        files=[ReleasedFile(name=name, size=len(content(version)[name]), digest=digests[name]) for name in NAMES],
        size=len(data), digest=blake3(data).hexdigest(),
    )  # fmt: skip


def install(folder: ReleaseFolder, version: int) -> None:
    """What a daemon does with an order, as far as files are concerned."""
    said = description(version)
    installed = folder.find(said)
    if installed is None:
        data = memoryview(b"".join(content(version).values()))
        installed = folder.add(said, (said.to_bytes(), b"s" * 64), data)
    folder.use("digits", installed)
    folder.note_announced("digits", None)
    folder.note_announced("digits", version)
    folder.clear("digits")
    installed.keep_evaluation({"metrics": {"accuracy": 0.5}})


def in_use(folder: Path) -> int:
    """The version in use, whose files must be whole; 0 for none. As the owner's program reads it."""
    current = folder / "digits" / "current"
    if not current.exists():
        return 0
    version = int(current.readlink().name)
    assert {name: (current / name).read_bytes() for name in NAMES} == content(version)
    return version


def test_the_version_in_use_and_the_one_before_it_are_kept(tmp_path: Path) -> None:
    """A way back needs no download; older versions are removed."""
    folder = ReleaseFolder(tmp_path)
    for version in (1, 2, 3):
        install(folder, version)
    assert (in_use(tmp_path), folder.in_use(), folder.announced("digits")) == (3, {"digits": 3}, 3)
    before = folder.before("digits")
    assert before is not None
    assert (before.version, before.evaluation()) == (2, {"metrics": {"accuracy": 0.5}})
    assert folder.find(description(1)) is None
    install(folder, 2)
    assert (in_use(tmp_path), folder.announced("digits")) == (2, 2)
    folder.use("digits", None)
    assert folder.in_use() == {}


def test_a_damaged_version_is_written_again(tmp_path: Path) -> None:
    """Its bytes are compared with the signed description, not with its name."""
    folder = ReleaseFolder(tmp_path)
    install(folder, 1)
    (tmp_path / "digits" / "00000001" / WEIGHTS).write_bytes(b"x")
    assert folder.find(description(1)) is None
    install(folder, 1)
    assert in_use(tmp_path) == 1


def test_other_files_in_the_folder_are_no_models(tmp_path: Path) -> None:
    """A link to nothing, a file, a description that is none."""
    (tmp_path / "a" / "00000001").mkdir(parents=True)
    (tmp_path / "a" / "current").symlink_to("00000001")
    (tmp_path / "a" / "00000001" / "description.json").write_text("{}")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "current").symlink_to("nowhere")
    (tmp_path / "text").write_text("")
    assert ReleaseFolder(tmp_path).in_use() == {}
    assert ReleaseFolder(tmp_path / "missing").in_use() == {}


def test_a_death_at_any_file_operation_leaves_a_whole_version_in_use(tmp_path: Path) -> None:
    """The one before or the new one, and never neither. The next process installs the new one, with the same bytes."""
    for at in count(1):
        folder = tmp_path / str(at)
        install(ReleaseFolder(folder), 1)
        with pytest.MonkeyPatch.context() as patch:
            DeathAfter(patch, at, ((Path, "rename"), (Path, "symlink_to"), (Path, "mkdir"), (Path, "rmdir")))
            try:
                install(ReleaseFolder(folder), 2)
            except Death:
                died = True
            else:
                died = False
        assert in_use(folder) in {1, 2}
        if not died:
            break
        install(ReleaseFolder(folder), 2)
        assert in_use(folder) == 2
        left = [path.name for path in (folder / "digits").iterdir() if path.suffix == PART]
        assert not left
    assert at > 20
