"""Hugging Face's hub: files of data sets, models and spaces."""

from __future__ import annotations

import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from headrace.errors import AccessDeniedError, OptionError
from headrace.fetch.web.client import Web
from headrace.types import Answer

# hf://datasets/ORG/NAME@REVISION/PATH; of the hub's own revisions these two kinds have slashes.
_PATH = re.compile(
    r"(?:(datasets|models|spaces)/)?((?!(?:datasets|models|spaces)/)[^/@]+/[^/@]+)(?:@(refs/pr/\d+|refs/convert/\w+|[^/]+))?/(.+)",
    re.DOTALL,
)
_REMEMBERED_S = 300.0
_REMEMBERED = 4096


class HuggingFaceStore:
    """Files on the hub; the path is what follows `hf://`.

    The hub answers with a redirect to a signed address of its storage. That address is remembered for some minutes, so
    that a range costs one request; where it is refused, the hub is asked anew.

    Args:
        storage_options: `token` (False: none) and `endpoint`; otherwise they come from where huggingface_hub has them.
        headers: go with each request to the hub.
        clock: monotonic seconds.

    Attributes:
        endpoint: the hub's address.
    """

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
        """See `Store.get`."""
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
            # An address of the hub itself needs the token still.
            if urlsplit(final)[:2] != urlsplit(address)[:2]:
                self._known[path] = until, final
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)

        return await self._web.get(
            address, start, stop, if_match=if_match, headers=self._headers, name=name, redirected=remember
        )

    async def aclose(self) -> None:
        """See `Store.aclose`; the connections are the reader's."""

    def _address(self, path: str) -> str:
        match = _PATH.fullmatch(path)
        if match is None:
            raise OptionError(
                f"hf://{path} is no file on the hub: hf://datasets/ORGANISATION/NAME[@REVISION]/PATH is one"
            )
        kind, repository, revision, file = match.groups()
        prefix = "" if kind in (None, "models") else f"{kind}/"
        revision = quote(unquote(revision or "main"), safe="")
        return f"{self.endpoint}/{prefix}{quote(repository)}/resolve/{revision}/{quote(file)}"


def _token(storage_options: Mapping[str, object]) -> str | None:
    """The token that was given, or else the user's own, from where huggingface_hub looks for it."""
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
