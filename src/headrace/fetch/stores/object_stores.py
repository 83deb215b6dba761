"""GCS and Azure by obstore, and what of S3 and the web our own client does not do: in Rust, off the GIL."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
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

from headrace.errors import (
    AccessDeniedError,
    BadResponseError,
    OptionError,
    ReadTimeoutError,
    ShortReadError,
    StorageError,
    is_secret_name,
    masked,
)
from headrace.fetch.panics import panic_in
from headrace.fetch.stores.key_ranges import list_in_ranges, without_folders
from headrace.fetch.web.statuses import code_in, encoded, is_plain, refusal
from headrace.options import FetchOptions
from headrace.types import Answer, Buffer, Listed

# Bodies up to this size come in one piece; longer ones in pieces of at least it. What was received of a piece is lost
# when the body is cut, and a stall is noticed by the piece; measured, pieces of 1 MiB cost 10 % less CPU than these.
_CHUNK_BYTES = 256 * 1024
_OUTER_SETTINGS = ("client_options", "credential_provider")
_GIVE_ENDS = ("gs://", "gcs://", "s3://", "s3a://")  # Azure knows no ranges by the end
_ADDRESSES = 64
_PAGE = 1000  # objects of a listing

# Types that obstore raises whether or not it says the status.
_STATUSES: dict[type, int] = {
    FileNotFoundError: 404,
    PermissionDeniedError: 403,
    UnauthenticatedError: 401,
    PreconditionError: 412,
}
_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_")
_PLACES = re.compile("(aws_|azure_|azure_storage_|google_)?(endpoint|endpoint_url|endpoint_url_s3|base_url)")
_SENT_KEYS = ("sse_customer_key", "encryption_key")  # which go with each request
_CLOUDS_OWN = re.compile(r"https://([\w-]+\.)+(amazonaws\.com(\.cn)?|googleapis\.com|windows\.net)(:443)?(/|$)")
_NOT_REDIRECTED = frozenset(("authorization", "cookie", "proxy-authorization"))  # to another host
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_GOT_RANGE = re.compile(r"Requested (\d+\.\.\d+), got (\d+\.\.\d+)")
_SYSTEM_MESSAGE = re.compile(r'message: "([^"]{1,200})"')


def open_remote(root: str, options: FetchOptions, storage_options: Mapping[str, Any], *, attempts: int = 1) -> Any:
    """The store of obstore's own for `root`.

    obstore's own attempts are switched off (the reader makes them) unless more than one is asked for, and its time-outs
    are the reader's; a connection that is silent for too long is ended in Rust, even where nobody awaits it.
    """
    outer = {name: storage_options[name] for name in _OUTER_SETTINGS if name in storage_options}
    config = {name: value for name, value in storage_options.items() if name not in outer}
    client = {
        "connect_timeout": f"{options.connect_timeout_s * 1e3:.0f}ms",
        "read_timeout": f"{max(options.stall_timeout_s, options.first_byte_timeout_s) * 1e3:.0f}ms",
        # obstore's 30 s for a whole body would cut long ones; the reader knows how long this one may take.
        "timeout": "1day",
        # About once in 500 times a closed store's last connection stays until this time is over (seen with
        # obstore 0.12). Servers end idle connections after some seconds too, and a request may then meet the end.
        "pool_idle_timeout": "2s",
        "allow_http": root.startswith("http://") or _is_plain(config),
        **outer.get("client_options", {}),
    }
    client["default_headers"] = {"accept-encoding": "identity", **client.get("default_headers", {})}
    _refuse_to_share(root, config, client["default_headers"])
    settings: dict[str, object] = {**outer, "client_options": client, "retry_config": {"max_retries": attempts - 1}}
    if root.startswith(("http://", "https://")):
        # Settings of a cloud are for the shards; an index that lies on the web next to them has none.
        settings.pop("credential_provider", None)
        make, config = partial(_web_store, root, settings), {}
    else:
        make = partial(_cloud_store, root, settings)
    store, why = make(config)
    if store is not None:
        return store
    alone = [name for name in config if make({k: v for k, v in config.items() if k != name})[0] is not None]
    which = f"storage_options[{alone[0]!r}] does" if alone else f"storage_options={sorted(storage_options)} do"
    raise OptionError(f"{which} not fit {masked(root)!r}: {why}")


def _refuse_to_share(root: str, config: Mapping[str, Any], headers: Mapping[str, object]) -> None:
    """Refuse secrets that obstore would send wherever it is redirected to. It cannot be told to follow no redirects.

    A cloud's own servers only lead to each other. Headers that are gone where a redirect leads to another host are no
    danger. Neither are tokens of a session, which sign nothing without the secret key.
    """
    if _is_clouds_own(root, config):
        return
    settings = {*map(str.lower, config), *(name.lower() for name in os.environ if name.startswith(_ENVIRONMENT))}
    keys = sorted(name for name in settings if any(key in name for key in _SENT_KEYS))
    shared = sorted(name for name in map(str, headers) if is_secret_name(name) and name.lower() not in _NOT_REDIRECTED)
    if shared or (keys and not root.startswith(("http://", "https://"))):
        what = f"the header {shared[0]}" if shared else keys[0]
        raise OptionError(
            f"{masked(root)!r} is read by obstore, which would send {what} wherever a redirect leads. Use the cloud's "
            "own endpoint by https. For a header, leave client_options and proxies out, or send it as Authorization."
        )


def _is_clouds_own(root: str, config: Mapping[str, Any]) -> bool:
    """True if a bucket is asked for at the cloud's own servers, by https."""
    if root.startswith(("http://", "https://")):
        return False
    given = {**{name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}, **config}
    places = [str(value) for name, value in given.items() if _PLACES.fullmatch(name.lower())]
    return all(_CLOUDS_OWN.match(place) for place in places if place)


async def list_remote(
    root: str, options: FetchOptions, storage_options: Mapping[str, Any], prefix: str
) -> AsyncIterator[list[Listed]]:
    """The objects of a bucket below a folder; a page that fails is asked for again, by obstore.

    Args:
        root: `s3://bucket`.
        prefix: empty, or the folder and a slash.

    Raises:
        StorageError: a page did not come.
    """
    try:
        store = open_remote(root, options, storage_options, attempts=options.attempts)

        async def pages(after: str | None) -> AsyncGenerator[Sequence[Listed], None]:
            async for page in store.list(prefix.rstrip("/") or None, offset=after, chunk_size=_PAGE):
                yield [Listed(one["path"], int(one["size"]), _quoted(one["e_tag"])) for one in page]

        in_order = root.startswith(("s3://", "s3a://"))  # the others' offsets are left out by obstore, or not tried
        async with aclosing(list_in_ranges(pages, _PAGE) if in_order else without_folders(pages(None))) as each:
            async for page in each:
                yield [one for one in page if one.path.startswith(prefix)]
    except (BaseError, OSError) as error:
        raise translated(error, f"{root}/{prefix}") from None


def _quoted(etag: str | None) -> str | None:
    """An ETag as answers have it: some listings leave the quotes out."""
    return etag if not etag or etag.endswith('"') else f'"{etag}"'


def _cloud_store(root: str, settings: Mapping[str, object], config: Mapping[str, object]) -> tuple[Any, str]:
    return _made(partial(from_url, root, config=config, **settings))


def _web_store(root: str, settings: Mapping[str, Any], _: Mapping[str, object]) -> tuple[Any, str]:
    return _made(partial(HTTPStore, root, **settings))


def _made(make: Callable[[], Any]) -> tuple[Any, str]:
    """(the store, nothing), or (None, in words why there is none)."""
    try:
        return make(), ""
    except (BaseError, TypeError, ValueError) as error:
        return None, str(error).partition("\n")[0]
    except BaseException as error:
        if failure := panic_in(error, "", obstore):
            return None, failure.reason
        raise


class RemoteStore:
    """One bucket or one web origin.

    Args:
        root: `s3://bucket`, `https://host`, or `https://host/?query`: the query goes with each request.
        storage_options: obstore's settings for the kind of store; also `client_options` and `credential_provider`.

    Attributes:
        gives_ends: whether a negative start gives so many of the last bytes.
    """

    def __init__(self, root: str, options: FetchOptions, storage_options: Mapping[str, object]) -> None:
        self._root, self._options, self._storage_options = root, options, storage_options
        self._store = open_remote(root, options, storage_options)
        self.gives_ends = root.startswith(_GIVE_ENDS)

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        """See `Store.get`."""
        options: dict[str, object] = {}
        if stop is not None:
            options["range"] = (start or 0, stop)
        elif start:
            options["range"] = {"offset": start} if start > 0 else {"suffix": -start}
        if if_match is not None:
            options["if_match"] = if_match
        if path.endswith("/") or path.startswith("/"):
            raise OptionError(f"{masked(self._address(path))!r}: obstore reads no keys that begin or end with a slash")
        try:
            return await self._answer(path, options, stop)
        except ValueError as error:
            raise OptionError(f"{masked(self._address(path))!r}: {str(error).partition(chr(10))[0]}") from None
        except (BaseError, OSError) as error:
            ignored = isinstance(error, NotSupportedError) and not start
            if _status(error) != 416 and not ignored:
                # Not chained: obstore's text has the whole address, signature and all, and the store's own words.
                raise translated(error, self._address(path)) from None
        # 416: nothing lies at `start`. Ranges ignored: what was asked for is the front of the whole.
        # The size comes with a GET whose body nobody reads (a HEAD would need a signature of its own).
        options.pop("range", None)
        try:
            return await self._answer(path, options, stop, start or 0)
        except (BaseError, OSError) as error:
            raise translated(error, self._address(path)) from None

    def listing(self, prefix: str, *, levels: int | None = None) -> AsyncIterator[list[Listed]]:  # noqa: ARG002
        """See `Lists.listing`; of a web origin nothing can be listed."""
        return list_remote(self._root, self._options, self._storage_options, prefix)

    async def aclose(self) -> None:
        """See `Store.aclose`; obstore's connections end with its last reference."""

    async def _answer(
        self, path: str, options: dict[str, object], stop: int | None, start: int | None = None
    ) -> Answer:
        """The answer to one request; with `start` the part [start, stop) of the whole that was asked for."""
        result = await obstore.get_async(self._store, path, options=options)  # type: ignore[arg-type]
        about = result.meta
        encoding = result.attributes.get("Content-Encoding", "")
        if not is_plain(encoding):
            del result  # with the body that nobody will read; the error's traceback would keep it
            raise BadResponseError(encoded(encoding), url=self._address(path))
        size = int(about["size"])
        first, last = result.range
        whole = last - first
        if start is not None:
            first = max(0, size + start) if start < 0 else min(start, size)
            last = size if stop is None else max(first, min(stop, size))
        chunks = self._chunks(result, path, whole, last - first)
        is_cloud = not self._root.startswith(("http://", "https://"))
        modified = str(about["last_modified"])
        return Answer(first, last, size, about["e_tag"], chunks, gives_ranges=is_cloud, modified=modified)

    async def _chunks(self, result: Any, path: str, whole: int, wanted: int) -> AsyncIterator[Buffer]:
        """The first `wanted` bytes of a body that has `whole`."""
        try:
            if wanted == whole <= _CHUNK_BYTES:
                if wanted:
                    # A memoryview, because obstore's own kind of bytes is none of those that Buffer names.
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

    The path is what stands in the address. obstore knows no queries, escapes paths itself and drops empty parts, so
    addresses with a query, and those that would not come out as they went in, have stores of their own: the latest few.

    Args:
        root: `https://host`.
        storage_options: of them `client_options`.
    """

    def __init__(self, root: str, options: FetchOptions, storage_options: Mapping[str, object]) -> None:
        self._root = root
        self._open = partial(RemoteStore, options=options, storage_options=storage_options)
        self._plain = self._open(root)
        self._others: OrderedDict[str, RemoteStore] = OrderedDict()

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        """See `Store.get`."""
        root, rest = split_path(self._root, path)
        store = self._plain
        if root != self._root:
            # One that is dropped ends with its last request: it has nothing to close.
            if root not in self._others:
                self._others[root] = self._open(root)
            store = self._others[root]
            self._others.move_to_end(root)
            if len(self._others) > _ADDRESSES:
                self._others.popitem(last=False)
        return await store.get(rest, start, stop, if_match=if_match)

    async def aclose(self) -> None:
        """See `Store.aclose`."""


def split_path(origin: str, path: str) -> tuple[str, str]:
    """The root of obstore's store for what stands after an origin, and the path to ask that for.

    A path that obstore would change (`%2F`, `//`, a trailing `/`, dots, what is not UTF-8) is a root of its own.
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
    """The HTTP status; obstore says it in words only, before the words of the store."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def translated(error: Exception, url: str) -> StorageError:
    """The error of ours that says what obstore's says.

    obstore has types for some statuses; for the rest its text is read: a summary line, then a dump of the Rust values.
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
