"""The folder of indexes on a machine that others use, too."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from headrace.formats.registry import format_named
from headrace.indexes import cache_path as module
from headrace.indexes.cache_path import cache_path, cached, names_path

URLS = ["s3://bucket/a.tar"]
TAR = format_named("tar")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of caches; folders that last as long as the process are made beside it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    module._folder_of_process.cache_clear()
    module._warn.cache_clear()


def test_folders_are_made_for_their_user_alone_whatever_the_umask_is(home: Path) -> None:
    before = os.umask(0)
    try:
        places = [cache_path(URLS), names_path("s3://bucket/")]
    finally:
        os.umask(before)
    assert cached(URLS, None, TAR) is None
    places[0].touch()
    assert cached(URLS, None, TAR) == places[0]
    made = [home, *home.rglob("*/")]
    assert len(made) == 4
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}


def indexes(home: Path) -> Path:
    folder = home / "headrace" / "indexes"
    folder.mkdir(parents=True)
    return folder


def link(home: Path, *, owner: int, target_owner: int) -> None:
    (home.parent / "target" / "indexes").mkdir(parents=True)
    os.chown(home.parent / "target", target_owner, -1)
    home.mkdir()
    (home / "headrace").symlink_to(home.parent / "target")
    os.chown(home / "headrace", owner, -1, follow_symlinks=False)


OTHER = 12345  # a user, and a group
PLANTED: dict[str, Callable[[Path], object]] = {
    "home that all can write": lambda home: home.mkdir() or home.chmod(0o777),
    "folder that all can write": lambda home: indexes(home).chmod(0o777),
    "folder that a group can write": lambda home: (
        os.chown(indexes(home).parent, -1, OTHER) or (home / "headrace").chmod(0o770)
    ),
    "folder of another user": lambda home: os.chown(indexes(home).parent, OTHER, -1),
    "link to the folder of another user": partial(link, owner=0, target_owner=OTHER),
    "link by another user": partial(link, owner=OTHER, target_owner=0),
    "file": lambda home: home.write_text(""),
}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("planted", PLANTED)
def test_folder_that_others_can_write_is_not_used_with_one_warning(home: Path, planted: str) -> None:
    PLANTED[planted](home)
    folder = home / "headrace" / "indexes"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        place = cache_path(URLS)
        assert cache_path(URLS) == place
        if folder.exists():
            (folder / place.name).touch()
            assert cached(URLS, None, TAR) is None
    assert home not in place.parents
    assert place.parent.stat().st_mode & 0o777 == 0o700
    assert all("set XDG_CACHE_HOME" in str(one.message) for one in warned)
    assert len({str(one.message) for one in warned}) == len(warned) == 1 + folder.exists()


def test_user_without_a_home_uses_a_temporary_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert cached(URLS, None, TAR) is None
    with pytest.warns(RuntimeWarning, match="no home; set XDG_CACHE_HOME"):
        place = cache_path(URLS)
    place.touch()
    assert cached(URLS, None, TAR) is None
    module._remove(place.parent, os.getpid())
    assert not place.parent.exists()
