"""Writes files to stores. headrace writes nothing there but indexes."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import anyio.to_thread

from headrace.errors import OptionError, StorageError, masked_text
from headrace.fetch.stores.addresses import CLOUD_SCHEMES, WEB_SCHEMES, for_obstore, panic_in, registered, split
from headrace.options import Fetch

_COPY_BYTES = 2**20
_ATTEMPTS = 6  # with growing pauses of obstore, a few seconds
# The timeouts are for answers, and an upload is answered when all has been sent.
_PATIENT = Fetch(stall_timeout_s=600, first_byte_timeout_s=600)


def check_writable(url: str) -> None:
    """Check that objects like `url` can be written at all. Raises OptionError if the address is not writable."""
    scheme = split(url)[0]
    if scheme in WEB_SCHEMES or scheme == "pipe" or registered(scheme) is not None:
        raise OptionError.at(url, "cannot be written to; give a path, or an address in an object store")


async def write_object(url: str, source: Path, storage_options: Mapping[str, object] | None = None) -> None:
    """Write the file `source` to `url`, replacing the object, atomically if the store can.

    Raises:
        OptionError: the address is not writable, or the options are invalid.
        StorageError: the write failed.
    """
    check_writable(url)
    scheme, root, path = split(url)
    if scheme == "file":
        await anyio.to_thread.run_sync(_copy, source, Path(path), url)
    elif scheme == "memory":
        from headrace.fetch.stores import memory

        memory.put(url, source.read_bytes())  # noqa: ASYNC240 (it is small: this is for tests)
    elif scheme in CLOUD_SCHEMES:
        await _upload(url, root, path, source, storage_options or {})
    else:
        await anyio.to_thread.run_sync(_put_by_fsspec, url, scheme, source, storage_options or {})


def replace_file(source: Path, target: Path) -> None:
    """Replace `target` by the file `source` of the same file system, durably. Raises OSError if the disk refused it."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def part_beside(target: Path) -> BinaryIO:
    """Create a temporary file in the folder of `target`. The caller removes or renames it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.part").open("xb")


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Open a temporary file, which durably replaces `target` at the end. It is removed after an error."""
    part = part_beside(target)
    try:
        with part:
            yield part
        replace_file(Path(part.name), target)
    finally:
        Path(part.name).unlink(missing_ok=True)


def _copy(source: Path, target: Path, url: str) -> None:
    try:
        with replacing(target) as part, source.open("rb") as file:
            shutil.copyfileobj(file, part, _COPY_BYTES)
    except OSError as error:
        raise StorageError(f"it could not be written: {error.strerror}", url=url) from error


async def _upload(url: str, root: str, path: str, source: Path, storage_options: Mapping[str, object]) -> None:
    import obstore
    from obstore.exceptions import BaseError

    from headrace.fetch.stores.object_stores import open_remote, translated

    settings = for_obstore(storage_options)
    settings.pop("ssl_context", None)
    if headers := settings.pop("headers", None):
        settings["client_options"] = {**settings.get("client_options", {}), "default_headers": dict(headers)}
    store = open_remote(root, _PATIENT, settings, attempts=_ATTEMPTS)
    try:
        await obstore.put_async(store, path, source)
    except (BaseError, OSError) as error:
        raise translated(error, url) from None
    except BaseException as error:
        if (panic := panic_in(error, url, store)) is None:
            raise
        raise panic from None


def _put_by_fsspec(url: str, scheme: str, source: Path, storage_options: Mapping[str, object]) -> None:
    import fsspec

    from headrace.fetch.stores.fsspec_store import not_opened

    try:
        file_system, path = fsspec.core.url_to_fs(url, **storage_options)
        file_system.put_file(str(source), path)
    except (ImportError, ValueError, TypeError) as error:
        raise not_opened(scheme, error, storage_options) from None
    except Exception as error:
        reason = masked_text(str(error), storage_options)
        raise StorageError(f"it could not be written: {type(error).__name__}: {reason}", url=url) from None
