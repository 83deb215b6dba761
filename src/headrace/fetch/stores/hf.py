"""Files of data sets, models and spaces on the Hugging Face hub."""

from __future__ import annotations

import json
import os
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from headrace.errors import AccessDeniedError, BadResponseError, ObjectMissingError, OptionError
from headrace.fetch.web.client import Web
from headrace.types import Answer, Listed

# hf://datasets/ORG/NAME@REVISION/PATH. These two kinds of the hub's own revisions contain slashes.
_PATH = re.compile(
    r"(?:(datasets|models|spaces)/)?((?!(?:datasets|models|spaces)/)[^/@]+/[^/@]+)(?:@(refs/pr/\d+|refs/convert/\w+|[^/]+))?/(.+)",
    re.DOTALL,
)
_NEXT = re.compile(r"""<([^>]*)>\s*;[^,]*rel="?next\b""")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REMEMBERED_S = 300.0
_REMEMBERED = 4096


class HuggingFaceStore:
    """Files on the hub. The path is the part after `hf://`.

    The hub redirects to a signed address of its storage. That address is cached for some minutes, so that a range needs
    one request. If it is refused, the hub is asked again.

    Args:
        storage_options: `token` (False: none) and `endpoint`. The defaults are huggingface_hub's.
        headers: Sent with each request to the hub.
    """

    gives_ends = True

    def __init__(
        self,
        storage_options: Mapping[str, object],
        web: Web,
        *,
        headers: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._web, self._clock = web, clock
        endpoint = storage_options.get("endpoint") or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        self.endpoint = str(endpoint).rstrip("/")
        token = _token(storage_options)
        self._headers = {**headers, "Authorization": f"Bearer {token}"} if token else headers
        self._known: OrderedDict[str, tuple[float, str]] = OrderedDict()

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        name = f"hf://{path}"
        until, signed = self._known.get(path, (0.0, ""))
        if self._clock() < until:
            try:
                return await self._web.get(signed, start, stop, if_match=if_match, name=name)
            except AccessDeniedError:
                self._known.pop(path, None)
        address = self._address(path)
        until = self._clock() + _REMEMBERED_S

        def remember(final: str) -> None:
            # An address of the hub itself still needs the token.
            if urlsplit(final)[:2] != urlsplit(address)[:2]:
                self._known[path] = until, final
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)

        return await self._web.get(
            address, start, stop, if_match=if_match, headers=self._headers, name=name, redirected=remember
        )

    async def listing(self, prefix: str, *, levels: int | None = None) -> AsyncIterator[list[Listed]]:
        kind, repository, revision, folder = _parts_of(prefix + ".")
        folder = folder.rpartition("/")[0]
        base = prefix[: len(prefix) - len(folder) - 1].rstrip("/") if folder else prefix.rstrip("/")
        place = f"{self.endpoint}/api/{kind or 'models'}/{quote(repository)}/tree/{revision}"
        address = f"{place}/{quote(folder)}" if folder else place
        following: str | None = f"{address}?recursive={'false' if levels == 1 else 'true'}&limit=1000"
        passed: set[str] = set()
        while following is not None and following not in passed:
            passed.add(following)
            try:
                body, link = await self._web.page(following, self._headers, name=f"hf://{prefix}")
                entries = json.loads(body)
                files = [one for one in entries if one["type"] == "file"]
                yield [Listed(f"{base}/{one['path']}", int(one["size"]), None) for one in files]
            except ObjectMissingError:
                if folder:
                    return  # no such folder; the hub answers a missing repository in the same way
                raise
            except (ValueError, KeyError, TypeError) as error:
                raise BadResponseError("the hub's list of files cannot be read", url=f"hf://{prefix}") from error
            match = _NEXT.search(link)
            # A mirror's pages may name the hub, so only the query is taken from the link, never the host.
            following = None if match is None else f"{address}?{urlsplit(match[1]).query}"

    async def pinned(self, prefix: str) -> str:
        """See `Pins.pinned`. Resolves a branch or tag to its current commit."""
        kind, repository, revision, file = _parts_of(prefix + ".")
        if not _COMMIT.fullmatch(revision):
            address = f"{self.endpoint}/api/{kind or 'models'}/{quote(repository)}/revision/{revision}?expand=sha"
            body, _ = await self._web.page(address, self._headers, name=f"hf://{prefix}")
            try:
                revision = str(json.loads(body)["sha"])
            except (ValueError, KeyError, TypeError):
                revision = ""
            if not _COMMIT.fullmatch(revision):
                raise BadResponseError("the hub does not report the commit of the revision", url=f"hf://{prefix}")
        return f"{f'{kind}/' if kind else ''}{repository}@{revision}/{file.removesuffix('.')}"

    async def aclose(self) -> None:
        """Do nothing: the reader closes the connections."""

    def _address(self, path: str) -> str:
        kind, repository, revision, file = _parts_of(path)
        prefix = "" if kind in (None, "models") else f"{kind}/"
        return f"{self.endpoint}/{prefix}{quote(repository)}/resolve/{revision}/{quote(file)}"


def _parts_of(path: str) -> tuple[str | None, str, str, str]:
    match = _PATH.fullmatch(path)
    if match is None:
        form = "hf://datasets/ORGANISATION/NAME[@REVISION]/PATH"
        raise OptionError.at(f"hf://{path}", f"is no file on the hub: {form} is one")
    kind, repository, revision, file = match.groups()
    return kind, repository, quote(unquote(revision or "main"), safe=""), file


def _token(storage_options: Mapping[str, object]) -> str | None:
    given = storage_options.get("token")
    if given is False:
        return None
    if isinstance(given, str):
        return given
    if token := os.environ.get("HF_TOKEN", "").strip():
        return token
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = os.environ.get("HF_HOME") or cache / "huggingface"
    try:
        return Path(os.environ.get("HF_TOKEN_PATH") or Path(home) / "token").expanduser().read_text().strip() or None
    except OSError:
        return None
