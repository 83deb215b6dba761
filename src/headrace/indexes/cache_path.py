"""Paths of index files: beside their shards, or in this machine's cache."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path

from headrace.errors import OptionError, masked, printable
from headrace.fetch.stores.addresses import WEB_SCHEMES, split
from headrace.formats.catalogues import split_path
from headrace.formats.format import Format

SUFFIX = ".hri"
_OURS, _INDEXES = "headrace", "indexes"
_FIRST = "tar"  # the format that is not part of the path


def cache_path(
    urls: Iterable[str], storage_options: Mapping[str, object] | None = None, form: Format | None = None
) -> Path:
    """Return the cache path of the index of these shards. The format defaults to tar."""
    return _place(_INDEXES, f"{_digest(urls, storage_options, form)}{SUFFIX}")


def names_path(place: str, storage_options: Mapping[str, object] | None = None) -> Path:
    return _place("manifests", f"{_digest((place,), storage_options, None)}.names")


def cached(urls: Iterable[str], storage_options: Mapping[str, object] | None, form: Format) -> Path | None:
    root = _root()
    try:
        folder = None if root is None else root / _OURS / _INDEXES
        if folder is None or not folder.exists():
            return None  # common, and it saves the digest of many addresses
        trouble = _trouble(folder)
        if trouble:
            _warn(f"indexes in {folder} are not used: {trouble}")
            return None
        place = folder / f"{_digest(urls, storage_options, form)}{SUFFIX}"
        return place if place.exists() else None
    except PermissionError:  # it is in another user's home
        return None


def _place(kind: str, name: str) -> Path:
    """Return a path in this machine's cache, in a folder private to this user."""
    root = _root()
    trouble = "this user has no home"
    if root is not None:
        folder = root / _OURS / kind
        try:
            for one in (root, root / _OURS, folder):
                one.mkdir(mode=0o700, parents=one == root, exist_ok=True)
            trouble = _trouble(folder)
            if not trouble and ((folder / name).exists() or os.access(folder, os.W_OK)):
                return folder / name
            trouble = trouble or f"{folder} cannot be written to"
        except OSError as error:
            trouble = str(error)
    return _folder_of_process(trouble) / name


def _root() -> Path | None:
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # this user has no home
        return None


def _trouble(folder: Path) -> str:
    """Describe why other users could write to a cache folder; empty if only this user can.

    A folder may be writable by the user's own group, which is a usual umask.
    """
    above = folder.parent.parent.stat()
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        return f"all users may write to {folder.parent.parent}"
    for one in (folder.parent, folder):
        for status in (one.lstat(), one.stat()):
            if status.st_uid != os.geteuid():
                return f"{one} is another user's"
            is_of_group = status.st_mode & stat.S_IWGRP and status.st_gid != status.st_uid
            if not stat.S_ISLNK(status.st_mode) and (status.st_mode & stat.S_IWOTH or is_of_group):
                return f"others may write to {one} (chmod go-w)"
    return ""


@cache
def _folder_of_process(trouble: str) -> Path:
    """Create a temporary folder for this process, in place of the cache."""
    try:
        path = Path(tempfile.mkdtemp(prefix="headrace-"))
    except OSError as error:
        raise OptionError(f"no cache ({trouble}), and no temporary folder ({error}): set XDG_CACHE_HOME") from error
    weakref.finalize(_folder_of_process, _remove, path, os.getpid())
    _warn(f"no cache of indexes is kept: {trouble}")
    return path


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)


@cache
def _warn(what: str) -> None:
    text = f"{what}; set XDG_CACHE_HOME to a folder that this user alone can write to"
    warnings.warn(printable(text), RuntimeWarning, stacklevel=4)


def _digest(urls: Iterable[str], storage_options: Mapping[str, object] | None, form: Format | None) -> str:
    lines = "\n".join(_absolute(url) for url in urls)
    if form is not None and form.name != _FIRST:
        lines += f"\nformat={form.name}"
    for name, value in sorted((storage_options or {}).items()):
        if "endpoint" in name.lower() or "account_name" in name.lower():
            lines += f"\n{name}={masked(str(value))}"
    return blake2b(lines.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()


def beside(url: str) -> str:
    if split(url)[0] not in WEB_SCHEMES:
        return url + SUFFIX
    path, rest = split_path(url)
    return path + SUFFIX + rest


def _absolute(url: str) -> str:
    if "://" in url and not url.startswith("file:") and "?" not in url and "@" not in url:
        return url  # the common case
    scheme, _, path = split(url)
    return str(Path(path).absolute()) if scheme == "file" else masked(url)
