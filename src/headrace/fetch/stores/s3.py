"""S3: obstore finds the credentials and signs addresses, and our HTTP client requests them."""

from __future__ import annotations

import functools
import os
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import timedelta

import obstore
from obstore.exceptions import BaseError

from headrace.errors import AccessDeniedError, OptionError, StorageError, masked, masked_text
from headrace.fetch.stores.object_stores import list_remote, open_remote, translated
from headrace.fetch.web.client import Web
from headrace.fetch.web.http1 import target_of
from headrace.options import Fetch
from headrace.types import Answer, Listed

_VALID = timedelta(hours=1)
# obstore renews credentials that expire within five minutes, so a new signature is valid for this long.
_REMEMBERED_S = 240.0
_REMEMBERED = 4096
_RENEWED_EVERY_S = 30.0
_AWS = re.compile(r"\.amazonaws\.com(\.cn)?$")
_TRUE = frozenset({"1", "true", "on", "yes", "y"})


class S3Store:
    """One bucket. Refused credentials are read again once: environment, files and providers.

    Keys that obstore cannot sign (with an empty part, "." or "..") are refused. `headers` are sent unsigned.
    """

    gives_ends = True

    def __init__(
        self,
        root: str,
        options: Fetch,
        storage_options: Mapping[str, object],
        web: Web,
        *,
        headers: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._web, self._headers, self._clock = root, web, headers, clock
        self._options, self._storage_options = options, storage_options
        self._open = functools.partial(_Signer, root, options, storage_options, clock)
        self._signer = self._open()
        self._renew_after = clock()

    @functools.cached_property
    def host(self) -> str | None:
        """Server whose buckets share limits. None for AWS, which limits each bucket by itself."""
        origin = target_of(self.endpoint).origin
        return None if _AWS.search(origin.host) else f"{origin.scheme}://{origin.authority}"

    @property
    def endpoint(self) -> str:
        try:
            return self._signer.unsigned("x")
        except (BaseError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise OptionError(
                f"storage_options['endpoint'] does not fit {masked(self._root)!r}: {masked_text(reason)}"
            ) from None

    @property
    def fits(self) -> bool:
        """True if signed addresses are enough for these settings. Others need signed headers."""
        return not any(
            self._signer.setting(name) for name in ("request_payer", "s3_express", "sse_customer_key_base64")
        )

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        name = f"{self._root}/{path}"
        if any(part in ("", ".", "..") for part in path.split("/")):
            raise OptionError(f"{masked(name)!r}: obstore signs no keys with an empty part or one of dots")
        signer = self._signer
        try:
            return await self._ask(signer, path, name, start, stop, if_match)
        except AccessDeniedError:
            if not self._renew(signer):
                raise
        return await self._ask(self._signer, path, name, start, stop, if_match)

    def listing(self, prefix: str, *, levels: int | None = None) -> AsyncIterator[list[Listed]]:
        return list_remote(self._root, self._options, self._storage_options, prefix)

    async def aclose(self) -> None:
        """Do nothing: the reader closes the connections."""

    async def _ask(
        self, signer: _Signer, path: str, name: str, start: int | None, stop: int | None, if_match: str | None
    ) -> Answer:
        address = await signer.address(path, name)
        return await self._web.get(address, start, stop, if_match=if_match, headers=self._headers, name=name)

    def _renew(self, refused: _Signer) -> bool:
        """Read credentials again, at most every 30 seconds. True if they are not those of `refused`."""
        if refused is self._signer and refused.signs and self._clock() >= self._renew_after:
            self._signer = self._open()
            self._renew_after = self._clock() + _RENEWED_EVERY_S
        return refused is not self._signer


class _Signer:
    """Addresses of one bucket, signed by the credentials at the time of creation."""

    def __init__(
        self, root: str, options: Fetch, storage_options: Mapping[str, object], clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._store = open_remote(root, options, storage_options)
        unsigned = {**self._store.config, "access_key_id": "none", "secret_access_key": "none"}
        for name in ("bucket", "session_token", "skip_signature"):
            unsigned.pop(name, None)
        self._unsigned = open_remote(root, options, {**unsigned, "client_options": {"allow_http": True}})
        self.signs = str(self.setting("skip_signature")).lower() not in _TRUE
        # Measured with obstore 0.12: `sign` costs 11 µs, `sign_async` 180. `sign` blocks the loop if credentials
        # have to be fetched first, which given keys never need.
        self._is_quick = "credential_provider" not in storage_options and bool(self.setting("access_key_id"))
        self._known: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def setting(self, name: str) -> object:
        return self._store.config.get(name) or os.environ.get(f"AWS_{name.upper()}")

    def unsigned(self, key: str) -> str:
        return obstore.sign(self._unsigned, "GET", key, _VALID).partition("?")[0]

    async def address(self, key: str, name: str) -> str:
        """Return a key's signed address. Requests are made only for credentials."""
        known = self._known.get(key)
        if known is not None and self._clock() < known[0]:
            return known[1]
        try:
            if not self.signs:
                return self.unsigned(key)
            if self._is_quick:
                return obstore.sign(self._store, "GET", key, _VALID)
            until = self._clock() + _REMEMBERED_S
            address = await obstore.sign_async(self._store, "GET", key, _VALID)
        except (TypeError, ValueError):
            raise OptionError(f"{masked(name)!r}: obstore signs no such key") from None
        except (BaseError, OSError) as error:
            failure = translated(error, name)
            kind = AccessDeniedError if isinstance(failure, AccessDeniedError) else StorageError
            raise kind(f"no credentials to sign with: {failure.reason}", url=name, status=failure.status) from None
        self._known[key] = until, address
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return address
