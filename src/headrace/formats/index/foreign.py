"""Indexes of other libraries: DALI's, of one shard, and wids', of many.

DALI's `wds2idx` writes text: a line with the version and the number of samples, then one line for each sample with
`field offset size` for each of its members, and from version 1.2 on `field offset size name`. wids writes JSON with
numbers of samples, without members.
"""

from __future__ import annotations

import json

import numpy as np

from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, masked
from headrace.formats.index.file import MAGIC
from headrace.formats.index.named_arrays import MOST
from headrace.formats.index.shard import ShardIndex, gaps
from headrace.formats.json_values import as_count, as_list, as_object, as_text
from headrace.types import Buffer

_NAMED = {b"v1.0": None, b"v1.1": False, b"v1.2": True}


def sniff(data: Buffer) -> str | None:
    """Return the kind of index: "headrace", "dali", "wids", or None."""
    head = bytes(data[:4096])
    if head.startswith(MAGIC):
        return "headrace"
    first = head.partition(b"\n")[0].split()
    if len(first) == 2 and first[0].startswith(b"v1.") and first[1].isdigit():
        return "dali"
    if head.lstrip().startswith(b"{") and (b'"wids_version"' in head or b'"shardlist"' in head):
        return "wids"
    return None


def _damage(what: str, why: str, line: int | None = None) -> FormatError:
    return FormatError(f"{masked(what)}{f', line {line}' if line else ''}: {why}", url=what)


def read_dali(text: Buffer, what: str) -> ShardIndex:
    """Parse an index made by `wds2idx`. It has no checksums, size and version.

    Before version 1.2 it has no names. The samples' keys are then their numbers, "000000000" and so on.

    Raises:
        FormatError: it is damaged or of no version 1.0, 1.1 or 1.2. The message contains `what` and the line.
    """
    text = bytes(text)
    first, *lines = text.split(b"\n")
    version, count, *_ = *first.split(), b"", b""
    if version not in _NAMED or not count.isdigit():
        raise _damage(what, f"this is no DALI index of version 1.0, 1.1 or 1.2: it begins with {first[:40]!r}")
    if b"\0" in text:
        raise _damage(what, "it has a zero byte in it: a name that ended with one would become another")
    while lines and not lines[-1].strip():
        lines.pop()
    if len(lines) != _number(count):
        raise _damage(what, f"it has {len(lines)} samples, not the {count.decode()} that it says")
    is_named = _NAMED[version]
    if is_named is None:  # exists with and without names
        words = lines[0].split() if lines else []
        is_named = len(words) % 4 == 0 and len(words) > 3 and words[3].lower().endswith(b"." + words[0].lower())
    keys: list[bytes] = []
    starts, field, offset, size = [0], [], [], []
    numbers: dict[str, int] = {}
    for line, sample in enumerate(lines, 2):
        key, members = _members(sample.split(), is_named, what, line)
        keys.append(b"%09d" % (line - 2) if key is None else key)
        for name, at, length in members:
            field.append(numbers.setdefault(name, len(numbers)))
            offset.append(at)
            size.append(length)
        if len(set(field[starts[-1] :])) < len(members):
            raise _damage(what, "the sample has a field twice", line)
        starts.append(len(field))
    rows = Rows(
        np.array(keys, np.bytes_) if keys else np.zeros(0, "S1"),
        np.array(starts, np.int64),
        np.array(field, np.int32),
        np.array(offset, np.int64),
        np.array(size, np.int64),
        tuple(numbers),
    )
    try:
        gaps(rows.offset, rows.size)
    except ValueError as error:
        raise _damage(what, str(error)) from None
    return ShardIndex(rows, None, -1, None)


def _members(
    words: list[bytes], is_named: bool, what: str, line: int
) -> tuple[bytes | None, list[tuple[str, int, int]]]:
    """Return a sample's key, if it has names, and (field, offset, size) of its members."""
    width = 4 if is_named else 3
    if not words or len(words) % width:
        shape = "field offset size name" if is_named else "field offset size"
        raise _damage(what, f"it is not made of '{shape}'; names with blanks in them cannot be read", line)
    keys: set[bytes] = set()
    members = []
    for k in range(0, len(words), width):
        extension = words[k]
        if is_named:
            name = words[k + 3]
            if not name.endswith(b"." + extension):
                raise _damage(what, f"the name {name[:80]!r} does not end with its field {extension[:80]!r}", line)
            keys.add(name[: -len(extension) - 1])
        field = extension.decode("utf-8", "surrogateescape").lower()
        offset, size = _number(words[k + 1]), _number(words[k + 2])
        if field.startswith("__") or offset is None or size is None:
            raise _damage(what, f"{b' '.join(words[k : k + 3])[:80]!r} is no field, offset and size", line)
        members.append((field, offset, size))
    if len(keys) > 1:
        raise _damage(what, "its members belong to several samples", line)
    return (keys.pop() if keys else None), members


def _number(digits: bytes) -> int | None:
    return int(digits) if digits.isdigit() and len(digits) < 20 and int(digits) <= MOST else None


def read_wids(text: Buffer, what: str) -> list[tuple[str, int, int | None]]:
    """Parse a wids index to address, samples and bytes (None: unknown) of each shard.

    Relative addresses are joined to the index's `base`, if it has one; else they are relative to the index.

    Raises:
        FormatError: it is no wids index, or refers to others. The message contains `what`.
    """
    try:
        index = as_object(json.loads(bytes(text)))
    except (ValueError, RecursionError) as error:
        raise _damage(what, f"this is no JSON: {error}") from None
    if index is None or index.get("wids_version", 1) != 1:
        raise _damage(what, "this is no wids index of version 1")
    shards = _shards(index, what)
    for part in _list(index, "datasets", what):
        if (inner := as_object(part)) is None:
            raise _damage(what, "one of its 'datasets' is no object, and its 'shardlist' is no list")
        shards += _shards(inner, what)
    if not shards:
        raise _damage(what, "this is no wids index: it has no 'shardlist'")
    return shards


def _list(index: dict[str, object], name: str, what: str) -> list[object]:
    found = as_list(index.get(name, []))
    if found is None:
        raise _damage(what, f"its {name!r} is no list")
    return found


def _shards(index: dict[str, object], what: str) -> list[tuple[str, int, int | None]]:
    shards = _list(index, "shardlist", what)
    if "source_url" in index:
        raise _damage(what, "it refers to another index (source_url), which is not followed: give that one")
    base = as_text(index.get("base"))
    listed = []
    for number, shard in enumerate(shards):
        facts = as_object(shard) or {}
        url, samples = as_text(facts.get("url")), as_count(facts.get("nsamples"), MOST)
        size = as_count(facts.get("filesize"), MOST)
        if url is None or samples is None or (size is None and facts.get("filesize") is not None):
            raise _damage(what, f"entry {number} of its shardlist lacks a 'url', 'nsamples' or 'filesize' that can be")
        if base is not None and "://" not in url and not url.startswith("/"):
            url = f"{base.rstrip('/')}/{url}"
        listed.append((url, samples, size))
    return listed
