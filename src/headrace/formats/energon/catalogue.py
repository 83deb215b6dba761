"""What the folder `.nv-meta` says: which shards each split has, and how many samples each shard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from headrace.errors import FormatError, OptionError, masked
from headrace.formats.folders import beside, file_name
from headrace.formats.format import Catalogue, ShardEntry
from headrace.formats.json_values import as_count, as_object, as_texts
from headrace.formats.tar.headers import shown

META = ".nv-meta/"
NAME = META + "split.yaml"
_INFO = (".info.json", ".info.yaml")
_DATASET = "dataset.yaml"
_SAMPLES_MOST = 2**40


def catalogued(url: str, data: bytes, split: str, others: Callable[[str], bytes | None]) -> Catalogue:
    """The shards of a split, in its order.

    Args:
        url: of `split.yaml`, whose bytes are `data`.
        split: its name.
        others: reads what lies beside it, by its name; None where there is no such object.

    Raises:
        FormatError: one of the files is damaged, or they contradict one another; it is named.
        OptionError: there is no such split, or PyYAML and braceexpand are not installed.
    """
    said = _parsed(data, url)
    splits = as_object(said.get("split_parts"))
    patterns = None if splits is None else as_texts(splits.get(split, []))
    excluded = as_texts(said.get("exclude") or [])
    if splits is None or patterns is None or excluded is None:
        raise _damage(url, "its split_parts and exclude are not lists of shards by the names of splits")
    if split not in splits:
        raise OptionError(f"{masked(url)} has no split {split!r:.80}; it has {', '.join(map(str, splits))[:300]}")
    counts, info = _counts(url, others)
    without = set(_expanded(excluded, len(counts), url))
    single = next((name for name in sorted(without) if name not in counts), None)
    if single is not None:
        raise FormatError(
            f"{masked(url)} excludes {single[:200]!r}, which is no shard of {masked(info)}: single samples are not "
            "left out here; remove the entry, and leave the sample out by .filter()",
            url=url,
        )
    names = [name for name in _expanded(patterns, len(counts), url) if name not in without]
    missing = next((name for name in names if name not in counts), None)
    if missing is not None:
        raise _damage(url, f"its split {split!r} has {missing[:200]!r}, which {masked(info)} does not count")
    entries = [ShardEntry(_address(url, name), counts[name]) for name in names]
    return Catalogue(entries, (("split", _shown_split(split, splits)), *_told_by_dataset(url, others)))


def _counts(url: str, others: Callable[[str], bytes | None]) -> tuple[dict[str, int], str]:
    """(samples of each shard, where that is said)."""
    for name in _INFO:
        data, place = others(name), beside(url, name)
        if data is None:
            continue
        said = as_object(_parsed(data, place).get("shard_counts"))
        counts = {} if said is None else {name: as_count(count, _SAMPLES_MOST) for name, count in said.items()}
        wrong = next((name for name, count in counts.items() if count is None), None)
        if said is None or wrong is not None:
            raise _damage(
                place, "it has no shard_counts" if said is None else f"it counts no samples of {wrong!r:.200}"
            )
        return {str(name): count or 0 for name, count in counts.items()}, place
    raise FormatError(
        f"{masked(url)}: neither {' nor '.join(_INFO)} lies beside it; `energon prepare` writes it", url=url
    )


def _address(url: str, name: str) -> str:
    """The address of a shard, which is said from the folder on that `.nv-meta` lies in."""
    try:
        checked = file_name(name)
    except ValueError as error:
        raise _damage(url, str(error)) from None
    if not checked.endswith(".tar"):
        raise FormatError(f"{masked(url)} has the shard {name[:200]!r}: plain archives, .tar, are read", url=url)
    end = url.rfind(NAME)
    return url[:end] + checked + url[end + len(NAME) :]


def _told_by_dataset(url: str, others: Callable[[str], bytes | None]) -> tuple[tuple[str, str], ...]:
    """What `dataset.yaml` wants done with samples, as far as nobody does it here."""
    data = others(_DATASET)
    if data is None:
        return ()
    said = _parsed(data, beside(url, _DATASET))
    kind = said.get("sample_type", said)
    name = kind.get("__class__") if isinstance(kind, dict) else None
    parts = [f"samples come as their members, and not as {name}"] if name else []
    if isinstance(said.get("sample_loader"), str):
        parts.append(f"{said['sample_loader']} is not run: call what it does in .map()")
    renamed = as_object(said.get("field_map"))
    if renamed is not None:
        fields = ", ".join(f"{new}={old}" for new, old in renamed.items())
        parts.append(f"the field_map ({fields}) is not applied: .rename() does it")
    return ((_DATASET, shown("; ".join(parts).encode()).strip("'\"")),) if parts else ()


def _shown_split(split: str, splits: dict[str, Any]) -> str:
    others = ", ".join(repr(name) for name in splits if name != split)
    return f"{split!r}" + (f"; there are {others} besides" if others else "")[:300]


def _expanded(patterns: list[str], most: int, url: str) -> Iterator[str]:
    """The names that patterns stand for; no more come than `most` of each."""
    try:
        from braceexpand import braceexpand
    except ImportError:
        raise _needs(url) from None
    for pattern in patterns:
        try:
            yield from islice(braceexpand(pattern), most + 1)
        except ValueError:
            raise _damage(url, f"the braces of {pattern[:200]!r} do not match") from None


def _parsed(data: bytes, url: str) -> dict[str, object]:
    try:
        if url.endswith(".json"):
            said = as_object(json.loads(data))
        else:
            import yaml

            said = as_object(yaml.load(data, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))  # noqa: S506 (both are safe)
    except ImportError:
        raise _needs(url) from None
    except (ValueError, RecursionError) as error:
        raise _damage(url, f"it cannot be parsed ({str(error)[:80]})") from None
    except Exception as error:  # YAML's own, which need not be there to be named
        raise _damage(url, f"it is no YAML ({' '.join(str(error).split())[:200]})") from None
    if said is None:
        raise _damage(url, "it is no object")
    return said


def _needs(url: str) -> OptionError:
    return OptionError(f"{masked(url)}: PyYAML and braceexpand read it; try: pip install 'headrace[energon]'")


def _damage(url: str, why: str) -> FormatError:
    return FormatError(f"{masked(url)} is damaged: {why}", url=url)
