"""Folders of files as samples, with classes from subfolders or fields from names."""

from __future__ import annotations

import os
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from urllib.parse import unquote

import numpy as np

from headrace.errors import OptionError, masked
from headrace.formats.images import EXTENSIONS
from headrace.sources.discovery.entries import Entries, entries_of, survey_of
from headrace.sources.discovery.kinds import extension_of, stem_of, without_extension
from headrace.sources.discovery.listing import Listing, is_data_folder
from headrace.sources.discovery.urls import Pattern
from headrace.sources.files import Facts, Objects, classes_of, digest_with
from headrace.sources.reading import Options
from headrace.types import Ints

_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval"})
_FIELD = re.compile(r"\{([^{}:]*)(?::([^{}]*))?\}")
_NAME = re.compile(r"[A-Za-z]\w*")
_KINDS = {"d": r"-?\d+", None: r"[^/]+?"}
_SHOWN = 5


class NamePattern:
    """A pattern of file names: "{split}/{label}_{id:d}.png", where `:d` is a whole number."""

    def __init__(self, text: str) -> None:
        self.text, self.fields, self._numbers = text, list[str](), set[str]()
        regex, end = "", 0
        for match in _FIELD.finditer(text):
            name, kind = match[1], match[2]
            if not _NAME.fullmatch(name) or kind not in _KINDS or name in self.fields:
                raise OptionError(f"pattern={text!r}: {match[0]!r} must be like {{name}} or {{name:d}}, each name once")
            regex += f"{re.escape(text[end : match.start()])}(?P<{name}>{_KINDS[kind]})"
            end = match.end()
            self.fields.append(name)
            if kind == "d":
                self._numbers.add(name)
        if not self.fields:
            raise OptionError(f"pattern={text!r} has no {{name}} in it")
        self._regex = re.compile(regex + re.escape(text[end:]))

    def __reduce__(self) -> tuple[object, ...]:
        return NamePattern, (self.text,)

    def of(self, path: str) -> dict[str, object] | None:
        """Return the fields of a path. None: the path does not match."""
        match = self._regex.fullmatch(path)
        if match is None:
            return None
        return {name: int(value) if name in self._numbers else value for name, value in match.groupdict().items()}


class FolderFiles(Objects):
    """Samples in a folder. Files that differ only in their extension are one sample.

    Args:
        urls: All files, sorted.
        starts: First file of each sample, then the number of files. None: each file is a sample.
        has_images: True if image files are the field `image`, whatever their extension.
    """

    def __init__(
        self,
        urls: Sequence[str],
        folder: str,
        *,
        has_images: bool,
        starts: Ints | None = None,
        classes: Sequence[str] | None = None,
        pattern: NamePattern | None = None,
        storage_options: Mapping[str, object] | None = None,
        facts: Facts = (),
    ) -> None:
        super().__init__(urls, storage_options, facts)
        self.folder, self.starts, self.pattern, self.has_images = folder, starts, pattern, has_images
        self.classes = None if classes is None else tuple(classes)
        self._numbers = {name: number for number, name in enumerate(classes or ())}

    def __len__(self) -> int:
        return len(self.urls) if self.starts is None else len(self.starts) - 1

    async def aget(self, key: int) -> dict[str, object]:
        first, last = (key, key + 1) if self.starts is None else (int(self.starts[key]), int(self.starts[key + 1]))
        urls = [self.urls[k] for k in range(first, last)]
        path = _path_below(self.folder, urls[0])
        stem = without_extension(path)
        sample: dict[str, object] = {"__key__": stem, "__url__": masked(urls[0]), **self._said(path)}
        if len(urls) == 1:
            bodies = [await self.body(first)]
        else:
            from headrace.formats.pinned_object import for_each

            bodies = await for_each(len(urls), lambda k: self.body(first + k))
        for url, body in zip(urls, bodies, strict=True):
            extension = extension_of(url)
            field = "image" if self.has_images and extension in EXTENSIONS else extension or "data"
            if field in sample:
                raise OptionError.at(url, f": sample {stem!r} has two fields {field!r}")
            sample[field] = body
        return sample

    def digest(self) -> str | None:
        return digest_with(survey_of(self.urls).digest, self.classes)

    def _said(self, path: str) -> dict[str, object]:
        if self.pattern is None:
            said: dict[str, object] = {} if self.classes is None else {"label": path.partition("/")[0]}
        else:
            said = self.pattern.of(path) or {}
        label = said.get("label")
        if self.classes is not None and isinstance(label, str):
            said["label"] = self._numbers[label]
        return said


def folder_of(
    listing: Listing,
    pattern: str | None,
    *,
    labels: bool | None,
    storage_options: Options,
    classes: Sequence[str] | None = None,
    facts: Facts = (),
) -> FolderFiles:
    """Return the samples of a listed folder; see `hr.folder`."""
    folder = listing.folder
    named = None if pattern is None else NamePattern(pattern)
    is_asked = labels is True or classes is not None
    found, is_by_folder = set[str](), named is None or named.text.startswith("{label}/")
    if named is not None:
        found = _labels_by_pattern(named, listing)
    elif labels is not False:
        found = _labels_by_folder(listing, is_asked=is_asked)
    if classes is not None and (labels is False or (named is not None and not found)):
        why = "labels=False" if labels is False else f"pattern={pattern!r} has no {{label}} that is a name"
        raise OptionError(f"hr.folder(classes={classes!r:.200}): {why}, so that there are no classes")
    without_files = set[str]()
    if found and is_by_folder and classes is None:
        without_files = _local_folders(listing) - found
    numbered = classes_of(found | without_files, classes, listing.place) if found or classes is not None else None
    urls, starts, fields = _grouped(listing.urls)
    why = "each file" if starts is None else "files that differ in their extensions alone"
    said = [("samples are", f"{why}: {_shown(fields)}")]
    extensions = {extension for sample in fields for extension in sample.split("+")}
    has_images = _has_images(fields) and not (named is not None and "image" in named.fields)
    if has_images:
        said.append(("image", f"field of the files in {', '.join(sorted(extensions & EXTENSIONS))}"))
    if numbered is not None:
        shown = ", ".join(numbered[:_SHOWN]) + (", …" if len(numbered) > _SHOWN else "")
        by = "the pattern" if named is not None else "the first folder's name"
        empty = len(numbered) - len(found)
        count = f"{len(numbered):,} classes" + (f" ({empty:,} of them without files)" if empty else "")
        said.append(("label", f"number of {count}, by {by}: {shown}"))
    return FolderFiles(
        urls,
        folder,
        has_images=has_images,
        starts=starts,
        classes=numbered,
        pattern=named,
        storage_options=storage_options,
        facts=(*facts, *said),
    )


def _labels_by_pattern(pattern: NamePattern, listing: Listing) -> set[str]:
    urls = listing.urls
    found: set[str] = set()
    others, first = 0, ""
    for url in urls:
        path = _path_below(listing.folder, url)
        said = pattern.of(path)
        if said is None:
            others, first = others + 1, first or path
            continue
        label = said.get("label")
        if isinstance(label, str):
            found.add(label)
    if others:
        raise OptionError(
            f"pattern={pattern.text!r}: {others:,} of {len(urls):,} files in {masked(listing.place)} are not named so, "
            f"such as {first!r}; leave these out by a pattern of addresses, such as '{masked(listing.folder)}*.png'"
        )
    return found


def _labels_by_folder(listing: Listing, *, is_asked: bool) -> set[str]:
    survey, folder = listing.urls.survey, listing.folder
    found, loose = {_path_below(folder, folder + name) for name in survey.folders}, survey.loose
    if loose and (found or is_asked):
        raise OptionError.at(
            listing.place,
            f"has {loose:,} files beside {len(found)} folders, which may be classes or not: "
            "give labels=False, or the address of the folder whose folders are the classes",
        )
    if found and found <= _SPLITS and not is_asked:
        raise OptionError.at(
            listing.place,
            f"has the folders {', '.join(sorted(found))}, which are no classes: give the "
            f"address of one, such as {masked(listing.folder)}{min(found)}/, or labels=False",
        )
    return found


def _local_folders(listing: Listing) -> set[str]:
    """Return a local folder's subfolders, also empty ones, which listings of files omit."""
    if "://" in listing.folder:
        return set()
    pattern = None if listing.is_whole else Pattern(listing.place)
    with os.scandir(listing.folder or ".") as entries:
        names = {entry.name for entry in entries if entry.is_dir()}
    return {name for name in names if (is_data_folder(name) if pattern is None else pattern.matches_below(name))}


def _path_below(folder: str, url: str) -> str:
    """Return the path of a URL below a folder, unescaped for http(s)."""
    path = url[len(folder) :]
    if "%" not in path or not folder.startswith(("http://", "https://")):
        return path
    return "/".join(unquote(part, errors="surrogateescape").replace("/", "%2F") for part in path.split("/"))


def _has_images(samples: Iterable[str]) -> bool:
    """True if there are images, and at most one per sample. `samples` are extensions, as `a+b`."""
    counts = [sum(extension in EXTENSIONS for extension in sample.split("+")) for sample in samples]
    return max(counts, default=0) == 1 and all("image" not in sample.split("+") for sample in samples)


def _grouped(urls: Entries) -> tuple[Entries, Ints | None, Counter[str]]:
    """Group sorted files into samples. Return the files, starts of samples, and their kinds.

    Sorting keeps files together that agree up to the first dot, but not always those that agree up to the last.
    """
    if urls.survey.is_single:
        return urls, None, Counter({name or "data": n for name, n in urls.survey.extensions.items()})
    is_sorted, lengths, fields = True, array("q"), Counter[str]()
    for _, group in groupby(urls, stem_of):
        some = list(group)
        in_order = sorted(some, key=_name_and_url) if len(some) > 1 else some
        is_sorted = is_sorted and in_order == some
        for _, files in groupby(in_order, without_extension):
            extensions = [extension_of(url) or "data" for url in files]
            lengths.append(len(extensions))
            fields["+".join(extensions)] += 1
    if not is_sorted:
        groups = groupby(urls.listed(), lambda one: stem_of(one.path))
        in_groups = (sorted(group, key=lambda one: _name_and_url(one.path)) for _, group in groups)
        revision, urls = urls.revision, entries_of(chain.from_iterable(in_groups), urls.start)
        urls.revision = revision
    if len(lengths) == len(urls):
        return urls, None, fields
    return urls, np.concatenate([[0], np.cumsum(np.frombuffer(lengths, np.int64))]), fields


def _shown(fields: Counter[str]) -> str:
    counts = [*fields.most_common(_SHOWN)]
    return ", ".join(f"{count:,} of {name}" for name, count in counts) + (", …" if len(fields) > _SHOWN else "")


def _name_and_url(url: str) -> tuple[str, str]:
    return without_extension(url), url
