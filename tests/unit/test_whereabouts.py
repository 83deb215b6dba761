"""Where indexes are kept on a machine that others use, too."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from headrace.errors import OptionError
from headrace.formats.registry import format_named
from headrace.indexes.whereabouts import cache_path, cached

URLS = ["s3://bucket/a.tar"]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user without a home, among temporary ones."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"headrace-{os.getuid()}"


def test_user_without_a_home_has_a_folder_of_its_own(own: Path) -> None:
    place = cache_path(URLS)
    assert own in place.parents
    assert own.stat().st_mode & 0o777 == 0o700
    assert cached(URLS, None, format_named("tar")) is None
    place.parent.mkdir(parents=True)
    place.touch()
    assert cached(URLS, None, format_named("tar")) == place


@pytest.mark.parametrize("planted", ["a link", "a file", "a folder of all", "a folder of somebody else"])
def test_what_somebody_has_put_in_its_place_is_not_taken(own: Path, planted: str) -> None:
    elsewhere = own.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    if planted == "a link":
        own.symlink_to(elsewhere)
    elif planted == "a file":
        own.touch()
    else:
        own.mkdir()
        if planted == "a folder of all":
            own.chmod(0o777)
        elif os.getuid() == 0:
            os.chown(own, 12345, -1)
        else:
            pytest.skip("only root can give a folder away")
    with pytest.raises(OptionError, match=r"no home .* XDG_CACHE_HOME"):
        cache_path(URLS)
    assert cached(URLS, None, format_named("tar")) is None
