"""Where indexes lie: beside their shards, or in this machine's cache."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from headrace.errors import OptionError, masked
from headrace.fetch.stores.addresses import split
from headrace.fetch.stores.registry import WEB_SCHEMES
from headrace.formats.format import Format

SUFFIX = ".hri"
_FIRST = "tar"  # the format of which a path does not say that it is that


def cache_path(
    urls: Iterable[str], storage_options: Mapping[str, object] | None = None, form: Format | None = None
) -> Path:
    """Where the index of these shards, in this order, of this format and in this store, is kept on this machine.

    Args:
        form: of the shards; None: tar.
    """
    lines = "\n".join(_absolute(url) for url in urls)
    if form is not None and form.name != _FIRST:
        lines += f"\nformat={form.name}"
    for name, value in sorted((storage_options or {}).items()):
        if "endpoint" in name.lower() or "account_name" in name.lower():
            lines += f"\n{name}={masked(str(value))}"
    name = blake2b(lines.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()
    return _folder() / f"{name}{SUFFIX}"


def names_path(place: str, storage_options: Mapping[str, object] | None = None) -> Path:
    """Where the list of a folder's or a pattern's objects is kept on this machine."""
    name = cache_path((place,), storage_options).stem
    return _folder().with_name("manifests") / f"{name}.names"


def cached(urls: Iterable[str], storage_options: Mapping[str, object] | None, form: Format) -> Path | None:
    """The index of these shards that is kept on this machine; None where there is none."""
    try:
        if not _folder().exists():
            return None  # most have none, and very many addresses
        place = cache_path(urls, storage_options, form)
        return place if place.exists() else None
    except (OptionError, PermissionError):  # there is no place, or it is in the home of somebody else
        return None


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # whoever we are has no home
        root = _own_temporary()
    return root / "headrace" / "indexes"


def _own_temporary() -> Path:
    """A folder among the temporary ones, where everybody may put things: made by this user, and for no other.

    Raises:
        OptionError: there is another one in its place.
    """
    path = Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OptionError(
            f"this user has no home to keep indexes in, and {path} is not its own, or others may write to it: set "
            "XDG_CACHE_HOME to a folder that is"
        )
    return path


def beside(url: str) -> str:
    """The address of the index that lies beside the shard at `url`, and is about it alone."""
    if split(url)[0] not in WEB_SCHEMES:
        return url + SUFFIX
    end = min((at for at in (url.find("?"), url.find("#")) if at >= 0), default=len(url))
    return url[:end] + SUFFIX + url[end:]


def _absolute(url: str) -> str:
    """`url` without secrets; of a local file one that means the same in every folder."""
    if "://" in url and not url.startswith("file:") and "?" not in url and "@" not in url:
        return url  # as nearly all are
    scheme, _, path = split(url)
    return str(Path(path).absolute()) if scheme == "file" else masked(url)
