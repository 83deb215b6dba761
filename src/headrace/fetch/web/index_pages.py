"""Lists folders of a web server by its index pages (nginx, Apache, http.server and others)."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from html.parser import HTMLParser
from typing import NamedTuple
from urllib.parse import quote, urljoin

import anyio

from headrace.errors import AccessDeniedError, BadResponseError, ObjectMissingError, OptionError
from headrace.types import Listed

Asks = Callable[[str], Awaitable[bytes]]
"""Returns the document at an address."""

_AT_ONCE = 8
_DEEPEST = 64  # nesting of folders, as links may be circular
_IS_INDEX = re.compile(r"\s*(?:Index of|Directory listing for|Directory:|Listing of)\s", re.IGNORECASE)
_MEND = "give the addresses as a list, a pattern in braces like 'a-{000..012}.tar', or the rows of a table (hr.table)"


class IndexPage(NamedTuple):
    """Files and folders of a folder, by relative address. Folders end with a slash."""

    files: list[Listed]
    folders: list[str]


async def list_pages(ask: Asks, base: str, prefix: str, levels: int | None) -> AsyncIterator[list[Listed]]:
    """List the objects of a folder, by page. Pages of one level are requested at once.

    Raises:
        OptionError: a page is no index of a folder.
        AccessDeniedError: the server refuses a page.
        ObjectMissingError: a subfolder is missing. If the first folder is missing, there are no objects.
    """
    folders, level = [prefix], 1
    while folders:
        if level > _DEEPEST:
            raise BadResponseError(f"its folders are nested more than {_DEEPEST} deep", url=f"{base}/{folders[0]}")
        below: list[str] = []
        for at in range(0, len(folders), _AT_ONCE):
            for folder, page in await _pages(ask, base, folders[at : at + _AT_ONCE], is_first=level == 1):
                if page.files:
                    yield [one._replace(path=f"{folder}{one.path}") for one in page.files]
                below += [f"{folder}{name}" for name in page.folders]
        folders, level = below if levels is None or level < levels else [], level + 1


async def _pages(ask: Asks, base: str, folders: Sequence[str], *, is_first: bool) -> list[tuple[str, IndexPage]]:
    pages: dict[str, IndexPage] = {}

    failed: list[Exception] = []

    async def read(folder: str) -> None:
        url = f"{base}/{folder}"
        try:
            pages[folder] = page_of(url, await ask(url))
        except ObjectMissingError as error:
            if is_first:
                pages[folder] = IndexPage([], [])
                return
            why = f"the index of the folder above has this one, and the server does not ({error.reason}); {_MEND}"
            failed.append(ObjectMissingError(why, url=url, status=error.status))
        except AccessDeniedError as error:
            why = f"the server does not show what this folder has ({error.reason}); {_MEND}"
            failed.append(AccessDeniedError(why, url=url, status=error.status))
        except Exception as error:  # one of them is raised instead of a group
            failed.append(error)

    async with anyio.create_task_group() as group:
        for folder in folders:
            group.start_soon(read, folder)
    if failed:
        raise failed[0]
    return [(folder, pages[folder]) for folder in folders]


def page_of(url: str, body: bytes) -> IndexPage:
    """Parse the index page of the folder at `url`. Raises OptionError if the page is no index of a folder."""
    if body.lstrip()[:1] == b"[":
        return _of_json(url, body)
    parser = _Links()
    parser.feed(body.decode("utf-8", "replace"))
    parser.close()
    if not any(map(_IS_INDEX.match, parser.titles)):
        said = next((f"; its title is {title.strip()[:80]!r}" for title in parser.titles if title.strip()), "")
        raise OptionError.at(url, f"cannot be listed: what is there is no index of a folder{said}; {_MEND}")
    files: dict[str, None] = {}
    folders: dict[str, None] = {}
    for link in parser.links:
        name = _below(url, link)
        if name is not None:
            (folders if name.endswith("/") else files)[name] = None
    return IndexPage([Listed(name) for name in files], list(folders))


def _of_json(url: str, body: bytes) -> IndexPage:
    page = IndexPage([], [])
    try:
        for one in json.loads(body):
            name = quote(one["name"], safe="")  # as in the pages of nginx and Python
            if one["type"] == "directory":
                page.folders.append(f"{name}/")
            elif one["type"] == "file":
                size = one.get("size")
                page.files.append(Listed(name, size if type(size) is int else None))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError.at(
            url, f"cannot be listed: the JSON that is there is no index of a folder, as nginx's is; {_MEND}"
        ) from error
    return page


def _below(url: str, link: str) -> str | None:
    try:
        there = urljoin(url, link.strip())
    except ValueError:
        return None
    name = there.removeprefix(url)
    if name == there or not name.strip("/") or "?" in name or "#" in name or "/" in name[:-1]:
        return None
    return name


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.titles: list[str] = []
        self._is_title = False

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        if tag in ("title", "h1"):
            self._is_title = True
            self.titles.append("")
        elif tag == "a":
            self.links += [link for name, link in attrs if name == "href" and link]

    def handle_endtag(self, tag: str) -> None:
        if tag in ("title", "h1"):
            self._is_title = False

    def handle_data(self, data: str) -> None:
        if self._is_title:
            self.titles[-1] += data
