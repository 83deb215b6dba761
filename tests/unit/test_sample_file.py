"""A file of samples gives what was added, or nothing, after any damage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.sample_cache.file import FolderPlace, KeepingPlace, SampleFile, place_of, table_end

ONE, OTHER = b"1" * 32, b"2" * 32
COUNT = 8


def piece(number: int) -> bytes:
    return bytes([number]) * (5 + number)


def got(file: SampleFile, number: int) -> bytes | None:
    data = file.read(number)
    return None if data is None else data.tobytes()


@pytest.fixture(params=["memory", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> KeepingPlace:
    return place_of(None if request.param == "memory" else tmp_path / "kept", None)


def test_file_returns_added_pieces(place: KeepingPlace) -> None:
    file = place.open(ONE, COUNT)
    assert got(file, 3) is None
    assert file.add(3, b"first")
    assert file.add(3, b"second")
    assert file.add(0, b"")
    assert [got(file, number) for number in range(4)] == [b"", None, None, b"second"]
    assert 3 in file
    assert 2 not in file


def test_folder_is_found_again_and_memory_is_not(tmp_path: Path) -> None:
    for place, is_kept in ((place_of(None, None), False), (place_of(tmp_path, None), True)):
        assert place.open(ONE, COUNT).add(1, b"piece")
        assert (got(place.open(ONE, COUNT), 1) == b"piece") is is_kept
        assert got(place.open(OTHER, COUNT), 1) is None
        assert got(place.open(ONE, COUNT + 1), 1) is None, "a file of another number of samples is replaced"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    file = place_of(folder, None).open(ONE, COUNT)
    for number in range(0, COUNT, 2):
        file.add(number, piece(number))
    (path,) = folder.iterdir()
    return path, path.read_bytes()


@given(data=st.data())
def test_damage_never_changes_a_piece(whole: tuple[Path, bytes], data: st.DataObject) -> None:
    path, written = whole
    changed = bytearray(written)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1)) if changed else 0
        how = data.draw(st.sampled_from(["byte", "cut", "zeros", "moved"]))
        if how == "cut":
            del changed[at:]
        elif how == "zeros":
            changed[at : at + 64] = bytes(len(changed[at : at + 64]))
        elif how == "moved":  # an entry of another number
            changed[at : at + 24] = changed[48 : 48 + 24]
        elif changed:
            changed[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    file = place_of(path.parent, None).open(ONE, COUNT)
    for number in range(COUNT):
        assert got(file, number) in (None, piece(number) if number % 2 == 0 else None)
        assert file.add(number, piece(number + 1))
        assert got(file, number) == piece(number + 1)


def test_truncated_open_file_returns_nothing(tmp_path: Path) -> None:
    file = place_of(tmp_path, None).open(ONE, COUNT)
    file.add(1, b"piece")
    (path,) = tmp_path.iterdir()
    for length in (table_end(COUNT) + 2, 10):
        os.truncate(path, length)
        assert got(file, 1) is None


@pytest.mark.parametrize("is_folder", [False, True])
def test_piece_without_room_is_not_kept(tmp_path: Path, is_folder: bool) -> None:
    place = place_of(tmp_path if is_folder else None, table_end(COUNT) + 10)
    file = place.open(ONE, COUNT)
    assert file.add(0, b"12345")
    assert not file.add(1, b"123456")
    assert file.add(2, b"12345")
    assert [got(file, number) for number in range(3)] == [b"12345", None, b"12345"]
    assert file.nbytes == table_end(COUNT) + 10


def test_least_recently_used_closed_files_make_room(tmp_path: Path) -> None:
    def left() -> set[str]:
        return {bytes.fromhex(path.stem).decode()[0] for path in tmp_path.iterdir()}

    size = table_end(COUNT) + 100
    place = place_of(tmp_path, 3 * size)
    held = place.open(b"h" * 32, COUNT)
    held.add(0, bytes(100))
    for number, identity in enumerate((b"a" * 32, b"b" * 32)):
        place.open(identity, COUNT).add(0, bytes(100))
        (path,) = tmp_path.glob(f"{identity.hex()[:40]}*")
        os.utime(path, (number, number))
    newest = place.open(b"n" * 32, COUNT)
    assert newest.add(0, bytes(100))
    assert left() == {"h", "b", "n"}
    assert not newest.add(1, bytes(2 * size))  # also without the other one: one of them is in use
    assert newest.add(1, bytes(size))
    assert left() == {"h", "n"}
    assert got(held, 0) == bytes(100)


def test_folder_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place_of(tmp_path, None).open(ONE, COUNT).add(1, b"piece")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="another user's"):
        place_of(tmp_path, None).open(ONE, COUNT)


def test_unfinished_files_are_removed_after_an_hour(tmp_path: Path) -> None:
    for name in ("old.part", "new.part"):
        (tmp_path / name).touch()
    os.utime(tmp_path / "old.part", (0, 0))
    place_of(tmp_path, None).open(ONE, COUNT).add(1, b"piece")
    assert [path.name for path in tmp_path.glob("*.part")] == ["new.part"]


ADDING = """
import random, sys
from pathlib import Path
from headrace.sample_cache.file import place_of

def piece(number):
    return random.Random(number).randbytes(200 + 13 * number)

file = place_of(sys.argv[1], None).open(b"1" * 32, 500)
rng = random.Random(int(sys.argv[2]))
print("ready", flush=True)
while True:
    number = rng.randrange(500)
    data = file.read(number)
    assert data is None or data.tobytes() == piece(number), "wrong bytes"
    if data is None:
        assert file.add(number, piece(number))
        assert file.read(number).tobytes() == piece(number)
    if sys.argv[3] == "once" and all(n in file for n in range(500)):
        break
"""


@pytest.mark.slow
@pytest.mark.process
def test_processes_fill_one_file_despite_kills(tmp_path: Path) -> None:
    def begun(number: int, how: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        arguments = [sys.executable, "-c", ADDING, str(tmp_path), str(number), how]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdout.close()
        return process

    for number in range(3):
        killed = begun(number, "forever")
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    each = [begun(number, "once") for number in range(10, 13)]
    assert [process.wait() for process in each] == [0, 0, 0]
    (path,) = tmp_path.iterdir()
    assert path.suffix == ".samples"
    assert isinstance(place_of(tmp_path, None), FolderPlace)
