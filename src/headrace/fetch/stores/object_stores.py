"""Stores by obstore: GCS, Azure, S3 by signed addresses, and cases of HTTP that our client does not support."""

from __future__ import annotations

import functools
import os
import re
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import unquote

import obstore
from obstore.exceptions import (
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import HTTPStore, from_url

from headrace._util.reads import clamped
from headrace.errors import (
    AccessDeniedError,
    BadResponseError,
    OptionError,
    ReadTimeoutError,
    ShortReadError,
    StorageError,
    is_secret_name,
    masked,
    masked_text,
)
from headrace.fetch.stores.addresses import panic_in
from headrace.fetch.stores.key_ranges import list_in_ranges, without_folders
from headrace.fetch.web.client import Web
from headrace.fetch.web.http1 import code_in, encoded, is_plain, refusal, target_of
from headrace.options import Fetch
from headrace.types import Answer, Buffer, Listed

# Bodies up to this size come in one piece, longer ones in pieces of at least this size. A partial piece is lost when
# the body breaks off, and stalls are detected by piece. Measured: pieces of 1 MiB cost 10 % less CPU than these.
_CHUNK_BYTES = 256 * 1024
_OUTER_SETTINGS = ("client_options", "credential_provider")
_GIVE_ENDS = ("gs://", "gcs://", "s3://", "s3a://")  # Azure does not support suffix ranges
_ADDRESSES = 64
_PAGE = 1000  # objects of a listing

# Types that obstore raises, with or without the status in its text.
_STATUSES: dict[type, int] = {
    FileNotFoundError: 404,
    PermissionDeniedError: 403,
    UnauthenticatedError: 401,
    PreconditionError: 412,
}
_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_")
_PLACES = re.compile("(aws_|azure_|azure_storage_|google_)?(endpoint|endpoint_url|endpoint_url_s3|base_url)")
_SENT_KEYS = ("sse_customer_key", "encryption_key")  # sent with each request
_CLOUDS_OWN = re.compile(r"https://([\w-]+\.)+(amazonaws\.com(\.cn)?|googleapis\.com|windows\.net)(:443)?(/|$)")
_NOT_REDIRECTED = frozenset(("authorization", "cookie", "proxy-authorization"))  # to another host
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_GOT_RANGE = re.compile(r"Requested (\d+\.\.\d+), got (\d+\.\.\d+)")
_SYSTEM_MESSAGE = re.compile(r'message: "([^"]{1,200})"')


def open_remote(root: str, options: Fetch, storage_options: Mapping[str, Any], *, attempts: int = 1) -> Any:
    """Open obstore's store for `root`.

    The reader makes the attempts, so obstore makes none unless `attempts` is more than 1. Timeouts are the reader's.
    Rust closes a connection that is silent too long, even if no task awaits it.
    """
    outer = {name: storage_options[name] for name in _OUTER_SETTINGS if name in storage_options}
    config = {name: value for name, value in storage_options.items() if name not in outer}
    client = {
        "connect_timeout": f"{options.connect_timeout_s * 1e3:.0f}ms",
        "read_timeout": f"{max(options.stall_timeout_s, options.first_byte_timeout_s) * 1e3:.0f}ms",
        # obstore's 30 s for a whole body would cut long ones. The reader has its own limit.
        "timeout": "1day",
        # About once in 500 times a closed store's last connection stays open for this time (seen with
        # obstore 0.12). Servers also close idle connections after some seconds, which may hit a request.
        "pool_idle_timeout": "2s",
        "allow_http": root.startswith("http://") or _is_plain(config),
        **outer.get("client_options", {}),
    }
    client["default_headers"] = {"accept-encoding": "identity", **client.get("default_headers", {})}
    _refuse_to_share(root, config, client["default_headers"])
    settings: dict[str, Any] = {**outer, "client_options": client, "retry_config": {"max_retries": attempts - 1}}
    if root.startswith(("http://", "https://")):
        # Settings of a cloud are for the shards, not for their index on the web.
        settings.pop("credential_provider", None)
        config = {}
        open_store: Callable[..., Any] = HTTPStore
    else:
        open_store = from_url
    make = partial(open_store, root, **settings)
    store, why = _made(make, config)
    if store is not None:
        return store
    alone = [name for name in config if _made(make, {k: v for k, v in config.items() if k != name})[0] is not None]
    which = f"storage_options[{alone[0]!r}] does" if alone else f"storage_options={sorted(storage_options)} do"
    raise OptionError(f"{which} not fit {masked(root)!r}: {why}")


def _refuse_to_share(root: str, config: Mapping[str, Any], headers: Mapping[str, object]) -> None:
    """Refuse secrets that obstore would send to redirect targets. It always follows redirects.

    A cloud's own servers only redirect to each other. Headers that are removed at a redirect to another host are safe.
    So are session tokens, which sign nothing without the secret key.
    """
    if _is_clouds_own(root, config):
        return
    settings = {*map(str.lower, config), *(name.lower() for name in os.environ if name.startswith(_ENVIRONMENT))}
    keys = sorted(name for name in settings if any(key in name for key in _SENT_KEYS))
    shared = sorted(name for name in map(str, headers) if is_secret_name(name) and name.lower() not in _NOT_REDIRECTED)
    if shared or (keys and not root.startswith(("http://", "https://"))):
        what = f"the header {shared[0]}" if shared else keys[0]
        raise OptionError.at(
            root,
            f"is read by obstore, which would send {what} wherever a redirect leads. Use the cloud's own endpoint by "
            "https. For a header, leave client_options and proxies out, or send it as Authorization.",
        )


def _is_clouds_own(root: str, config: Mapping[str, Any]) -> bool:
    if root.startswith(("http://", "https://")):
        return False
    given = {**{name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}, **config}
    places = [str(value) for name, value in given.items() if _PLACES.fullmatch(name.lower())]
    return all(_CLOUDS_OWN.match(place) for place in places if place)


async def list_remote(
    root: str, options: Fetch, storage_options: Mapping[str, Any], prefix: str
) -> AsyncIterator[list[Listed]]:
    """List the objects of the bucket `root` in the folder `prefix`. obstore retries pages.

    Raises:
        StorageError: a page failed.
    """
    try:
        store = open_remote(root, options, storage_options, attempts=options.attempts)

        async def pages(after: str | None) -> AsyncGenerator[Sequence[Listed], None]:
            async for page in store.list(prefix.rstrip("/") or None, offset=after, chunk_size=_PAGE):
                yield [Listed(one["path"], int(one["size"]), _quoted(one["e_tag"])) for one in page]

        in_order = root.startswith(("s3://", "s3a://"))  # obstore ignores the offset for others, or it is not tested
        async with aclosing(list_in_ranges(pages, _PAGE) if in_order else without_folders(pages(None))) as each:
            async for page in each:
                yield [one for one in page if one.path.startswith(prefix)]
    except (BaseError, OSError) as error:
        raise translated(error, f"{root}/{prefix}") from None


def _quoted(etag: str | None) -> str | None:
    """Return an ETag as in answers. Some listings omit the quotes."""
    return etag if not etag or etag.endswith('"') else f'"{etag}"'


def _made(make: Callable[..., Any], config: Mapping[str, object]) -> tuple[Any, str]:
    try:
        return make(**{"config": config} if config else {}), ""
    except (BaseError, TypeError, ValueError) as error:
        return None, str(error).partition("\n")[0]
    except BaseException as error:
        if failure := panic_in(error, "", obstore):
            return None, failure.reason
        raise


class RemoteStore:
    """One bucket or one web origin.

    Args:
        root: `s3://bucket`, `https://host`, or `https://host/?query`, whose query is sent with each request.
        storage_options: obstore's settings for the kind of store, with `client_options` and `credential_provider`.
    """

    def __init__(self, root: str, options: Fetch, storage_options: Mapping[str, object]) -> None:
        self._root, self._options, self._storage_options = root, options, storage_options
        self._store = open_remote(root, options, storage_options)
        self.gives_ends = root.startswith(_GIVE_ENDS)

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        options: dict[str, object] = {}
        if stop is not None:
            options["range"] = (start or 0, stop)
        elif start:
            options["range"] = {"offset": start} if start > 0 else {"suffix": -start}
        if if_match is not None:
            options["if_match"] = if_match
        if path.endswith("/") or path.startswith("/"):
            raise OptionError.at(self._address(path), ": obstore reads no keys that begin or end with a slash")
        try:
            return await self._answer(path, options, stop)
        except ValueError as error:
            raise OptionError.at(self._address(path), f": {str(error).partition(chr(10))[0]}") from None
        except (BaseError, OSError) as error:
            ignored = isinstance(error, NotSupportedError) and not start
            if _status(error) != 416 and not ignored:
                # Not chained: obstore's text has the signed address, and the store's own text.
                raise translated(error, self._address(path)) from None
        # 416: `start` is beyond the end. Ranges ignored: the requested range is the front of the whole object.
        # A GET whose body is not read reports the size (a HEAD would need another signature).
        options.pop("range", None)
        try:
            return await self._answer(path, options, stop, start or 0)
        except (BaseError, OSError) as error:
            raise translated(error, self._address(path)) from None

    def listing(self, prefix: str, *, levels: int | None = None) -> AsyncIterator[list[Listed]]:
        return list_remote(self._root, self._options, self._storage_options, prefix)

    async def aclose(self) -> None:
        """Do nothing: obstore's connections end with its last reference."""

    async def _answer(
        self, path: str, options: dict[str, object], stop: int | None, start: int | None = None
    ) -> Answer:
        """Return the answer to one request; with `start`, [start, stop) of the whole object."""
        result = await obstore.get_async(self._store, path, options=options)  # type: ignore[arg-type]
        about = result.meta
        encoding = result.attributes.get("Content-Encoding", "")
        if not is_plain(encoding):
            del result  # with its unread body, which the error's traceback would keep
            raise BadResponseError(encoded(encoding), url=self._address(path))
        size = int(about["size"])
        first, last = result.range
        whole = last - first
        if start is not None:
            first, last = clamped(start, stop, size)
        chunks = self._chunks(result, path, whole, last - first)
        is_cloud = not self._root.startswith(("http://", "https://"))
        modified = str(about["last_modified"])
        return Answer(first, last, size, about["e_tag"], chunks, gives_ranges=is_cloud, modified=modified)

    async def _chunks(self, result: Any, path: str, whole: int, wanted: int) -> AsyncIterator[Buffer]:
        try:
            if wanted == whole <= _CHUNK_BYTES:
                if wanted:
                    # A memoryview, because obstore's own type is not part of Buffer.
                    yield memoryview(await result.bytes_async())
                return
            left = wanted
            if left:
                async for chunk in result.stream(_CHUNK_BYTES):
                    yield chunk if wanted == whole else memoryview(chunk)[:left]
                    left -= len(chunk)
                    if left <= 0 and wanted != whole:
                        return
        except (BaseError, OSError) as error:
            raise translated(error, self._address(path)) from None

    def _address(self, path: str) -> str:
        if not path:
            return self._root
        origin, mark, query = self._root.partition("/?")
        return f"{origin}/{path}{'?' if mark else ''}{query}"


class RemoteWebStore:
    """One web origin by obstore: through a proxy, or with settings that only obstore has.

    obstore does not support queries, escapes paths itself and drops empty parts. So addresses with a query, and those
    that obstore would change, get their own store. The latest few are kept.
    """

    def __init__(self, root: str, options: Fetch, storage_options: Mapping[str, object]) -> None:
        self._root = root
        self._plain = RemoteStore(root, options, storage_options)
        open_store = partial(RemoteStore, options=options, storage_options=storage_options)
        self._other = functools.lru_cache(_ADDRESSES)(open_store)  # a dropped store ends with its last request

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        root, rest = split_path(self._root, path)
        store = self._plain if root == self._root else self._other(root)
        return await store.get(rest, start, stop, if_match=if_match)

    async def aclose(self) -> None:
        """Do nothing, as `RemoteStore.aclose`."""


def split_path(origin: str, path: str) -> tuple[str, str]:
    """Split the part after an origin into the root of obstore's store and the path in it.

    A path that obstore would change (`%2F`, `//`, a trailing `/`, dots, invalid UTF-8) becomes part of the root.
    """
    path, mark, query = path.partition("?")
    try:
        plain = unquote(path, errors="strict")
    except UnicodeDecodeError:
        plain = ""
    if "%2f" in path.lower() or any(part in ("", ".", "..") for part in plain.split("/")):
        return f"{origin}/{path}{mark}{query}", ""
    return f"{origin}/?{query}" if query else origin, plain


def _is_plain(config: Mapping[str, object]) -> bool:
    endpoints = (value for name, value in config.items() if "endpoint" in name.lower())
    return any(str(endpoint).startswith("http://") for endpoint in endpoints)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status, which obstore reports only in its text, before the store's text."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def translated(error: Exception, url: str) -> StorageError:
    """Return the StorageError for an error of obstore.

    obstore has types for some statuses. Otherwise its text is parsed: a summary line, then a dump of the Rust values.
    """
    text = str(error)
    status = _status(error) or next((_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES), None)
    if status is not None:
        return refusal(status, code_in(text), url=url)
    if isinstance(error, NotSupportedError):
        return BadResponseError("the server ignores byte ranges, and gave the whole object", url=url)
    got = _GOT_RANGE.search(text)
    if got:
        return BadResponseError(f"asked for bytes {got[1]}, the answer is {got[2]}", url=url)
    if "source: Header {" in text or "Redirect" in text:
        reason = text.partition("\n")[0].rpartition(" - ")[2].removeprefix("Generic HTTP error: ")
        return BadResponseError(f"the answer cannot be used: {reason}", url=url)
    if "169.254.169.254" in text:
        return AccessDeniedError("no credentials found; give them, or skip_signature, in storage_options", url=url)
    if "kind: Timeout" in text or "TimedOut" in text:
        return ReadTimeoutError("no connection or no byte in time", url=url)
    said_below = _SYSTEM_MESSAGE.search(text)
    below = f": {said_below[1]}" if said_below else ""
    if "kind: Connect" in text:
        return StorageError(f"no connection{below}", url=url)
    if "kind: Body" in text:
        return ShortReadError(f"the connection ended within the body{below}", url=url)
    if "kind: Interrupted" in text or "kind: Request" in text:
        return StorageError(f"the connection ended before the answer{below}", url=url)
    return StorageError(f"obstore failed with {type(error).__name__}", url=url)


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
        self, root: str, options: Fetch, storage_options: Mapping[str, object], web: Web, *, headers: Mapping[str, str]
    ) -> None:
        self._root, self._web, self._headers = root, web, headers
        self._options, self._storage_options = options, storage_options
        self._open = functools.partial(_Signer, root, options, storage_options)
        self._signer = self._open()
        self._renew_after = time.monotonic()

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
            raise OptionError.at(name, ": obstore signs no keys with an empty part or one of dots")
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
        if refused is self._signer and refused.signs and time.monotonic() >= self._renew_after:
            self._signer = self._open()
            self._renew_after = time.monotonic() + _RENEWED_EVERY_S
        return refused is not self._signer


class _Signer:
    """Addresses of one bucket, signed by the credentials at the time of creation."""

    def __init__(self, root: str, options: Fetch, storage_options: Mapping[str, object]) -> None:
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
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        try:
            if not self.signs:
                return self.unsigned(key)
            if self._is_quick:
                return obstore.sign(self._store, "GET", key, _VALID)
            until = time.monotonic() + _REMEMBERED_S
            address = await obstore.sign_async(self._store, "GET", key, _VALID)
        except (TypeError, ValueError):
            raise OptionError.at(name, ": obstore signs no such key") from None
        except (BaseError, OSError) as error:
            failure = translated(error, name)
            kind = AccessDeniedError if isinstance(failure, AccessDeniedError) else StorageError
            raise kind(f"no credentials to sign with: {failure.reason}", url=name, status=failure.status) from None
        self._known[key] = until, address
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return address
