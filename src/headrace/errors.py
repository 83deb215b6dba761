"""Every error that headrace raises.

    HeadraceError
      OptionError (ValueError)          an option has an invalid value; raised by constructors
        CannotCarryError (TypeError)    an object that workers need cannot be sent to them
        LateOptionError (AssertionError)   options that torch refuses by an assertion in `iter`
      StateMismatchError (ValueError)   a saved state belongs to another plan
      LoaderClosedError (RuntimeError)  the loader or iterator was closed
      LoaderBusyError (RuntimeError)    the loader is in use in a way that excludes the call
      NotReady                          `try_next()` has no batch yet
      StageError                        a stage failed on a sample
        StorageError                    a read failed for good: url, byte range, attempts
          ObjectMissingError            the object does not exist
          AccessDeniedError             the store refused the credentials or the right to read
          ThrottledError                the store kept asking for fewer requests
          ReadTimeoutError (TimeoutError)   no byte arrived in time
          ShortReadError                fewer bytes arrived than the store had announced
          BadResponseError              the response is not the requested range
          ChecksumError                 the bytes differ from those that were written
          ObjectChangedError            the object was replaced while it was read
        FormatError                     the bytes do not follow the format
          LimitError                    a declared size or count is over its limit
        DecodeError                     the bytes of a field cannot be decoded
        CollateError                    samples cannot be collated into a batch
        WorkerDiedError (RuntimeError)  a worker process ended on each attempt at a sample


All of them survive pickling with their attributes, notes and cause: errors cross processes.
A user's own exception is never replaced by one of these; it keeps its type, and notes state where it was raised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Self
from urllib.parse import unquote

_SECRET_NAMES = re.compile(
    "signature|token|sig|key|credential|pass|pwd|secret|auth|jwt|hmac|hdn|code|sas|session|bearer|cookie|ticket",
    re.IGNORECASE,
)
_PIPE = re.compile(r"\s*pipe:", re.IGNORECASE)
_COMMAND = re.compile(r"[\w./+-]+")
_LINKS = re.compile(r"::(?![^\[\]]*\])")  # between the links of an fsspec chain; those of [::1] belong to a host
_BEFORE_AUTHORITY = re.compile(r"\s*(?:file:[/\\]{2}|(?!file:)[a-z][a-z0-9+.-]+:[/\\]+|https?:|//)", re.IGNORECASE)
_PORT = re.compile(r":(?![^\[]*\])")
_HOST = re.compile(r"(?:[\w.-]+|\[[^\]]*\])(?::\d+)?")
_HOST_BEHIND = re.compile("@[^/@]+/")
_WITH_CONTAINERS = re.compile(r"\s*(?:abfs|wasb)s?:", re.IGNORECASE)  # container@account is no secret
_WEB = re.compile(r"\s*https?:", re.IGNORECASE)
_PATH_PARAMETER = re.compile(r";([^;/=]*)=[^;/]*")
_PARAMETER = re.compile("([^?#&;=]+)=")
_UNQUOTED_AT_MOST = 3  # times
_WORDS_IN_TEXT = "(?:token|pass|pwd|secret|signature|credential|key|auth|session|bearer|cookie)"
_ADDRESS = re.compile(r"(?<![\w+.-])[A-Za-z][A-Za-z0-9+.-]+://\S+")
_NAMED = rf"(?<![\w-])--?[\w-]*{_WORDS_IN_TEXT}[\w-]*\s+|{_WORDS_IN_TEXT}[\w-]*['\"]?\s*[=:]\s*"
_SECRET = re.compile(rf"(?i)((?:{_NAMED})(?:(?:bearer|basic)\s+)?|\b(?:bearer|basic)\s+)\S+")
_LONGEST = 2048  # characters of foreign text: bounds the time of the search
_SHORTEST = 4  # to hide shorter ones would hide half of the text


def _rebuild(cls: type[HeadraceError], args: tuple[Any, ...], state: dict[str, Any]) -> HeadraceError:
    error = cls.__new__(cls)
    error.args = args
    cause = state.pop("__cause__", None)
    error.__dict__.update(state)
    if cause is not None:
        error.__cause__ = cause
    return error


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return `text` with control characters escaped."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


_REASON_MOST = 500  # characters of a foreign error text, which may contain names from the data


def reason_of(error: BaseException) -> str:
    """Return the shortened text of an error of a library, or the name of its type."""
    return str(error)[:_REASON_MOST] or type(error).__name__


class HeadraceError(Exception):
    """Base of all errors of this package."""

    def __str__(self) -> str:
        return printable(super().__str__())

    def __reduce__(self) -> tuple[object, ...]:
        state = dict(self.__dict__)
        if isinstance(self.__cause__, HeadraceError):
            state["__cause__"] = self.__cause__
        return _rebuild, (type(self), self.args, state)


class OptionError(HeadraceError, ValueError):
    """An option has an invalid value. The message names the option, the value and valid ones."""

    @classmethod
    def at(cls, url: str, why: str) -> Self:
        """Return the error of an option that does not fit the object at `url`, whose secrets are hidden."""
        return cls(_named(url, why))


class LateOptionError(OptionError, AssertionError):
    """Options that exclude each other. torch's loader asserts these only in `iter`."""


class CannotCarryError(OptionError, TypeError):
    """An object that workers need cannot be sent to them; the message names the attribute.

    Open it in the worker, when it is first needed, or use `multiprocessing_context="fork"`.

    Attributes:
        what: First sentence of the message: the object, and why it cannot be sent.
    """

    def __init__(self, *args: object, what: str = "") -> None:
        super().__init__(*args)
        self.what = what


class StateMismatchError(HeadraceError, ValueError):
    """A saved state belongs to another plan. The message names the field that differs.

    Attributes:
        field: Name of that field.
    """

    def __init__(self, *args: object, field: str = "") -> None:
        super().__init__(*args)
        self.field = field


class LoaderClosedError(HeadraceError, RuntimeError):
    """The loader was closed, or its process was forked. Make a new loader."""


class LoaderBusyError(HeadraceError, RuntimeError):
    """The loader is in use in a way that excludes the call."""


class NotReady(HeadraceError):
    """No batch is ready yet. Retry later, or wait with `next`."""


class StageError(HeadraceError):
    """A stage failed on a sample.

    Attributes:
        stage: "plan", "fetch", "scan", "decode", "map", "filter", "collate" or "deliver".
        url: Address of the shard or object, with secrets hidden.
        key: Key of the sample.
        batch: Number of the batch in its epoch.
    """

    def __init__(
        self,
        message: str,
        *,
        stage: str | None = None,
        url: str | None = None,
        key: object = None,
        batch: int | None = None,
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.url = masked(url) if url is not None else None
        self.key = key
        self.batch = batch


class StorageError(StageError):
    """A read failed for good.

    Attributes:
        reason: What happened, without the address, the range and the attempts that the message has too.
        start, stop: Requested byte range. None for the whole object. A negative start counts bytes from the end.
        attempts: Number of requests made.
        status: Last HTTP status, if any.
        retry_after_s: Seconds after which the store allows a retry, if the store named them.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str = "",
        start: int | None = None,
        stop: int | None = None,
        attempts: int = 1,
        status: int | None = None,
        retry_after_s: float | None = None,
        key: object = None,
    ) -> None:
        text, where = message, masked(url)
        if start is not None and start < 0:
            where += f", the last {-start} bytes"
        elif start is not None or stop is not None:
            where += f", bytes {start or 0} to {'the end' if stop is None else stop}"
        tries = f"{attempts} attempt{'' if attempts == 1 else 's'}"
        if url:
            text = f"{message} ({where}; {tries})"
        super().__init__(text, stage="fetch", url=url or None, key=key)
        self.reason = message
        self.start, self.stop, self.attempts, self.status = start, stop, attempts, status
        self.retry_after_s = retry_after_s

    def about(self, url: str, start: int | None, stop: int | None, attempts: int) -> StorageError:
        """Return this error for another address or range. An error of a store's own type becomes one of ours."""
        kind: type[StorageError] = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        error = kind(self.reason, url=url, start=start, stop=stop, attempts=attempts, status=self.status)
        error.retry_after_s = self.retry_after_s
        return error


class ObjectMissingError(StorageError):
    """The object does not exist. Check the address."""


class AccessDeniedError(StorageError):
    """The store refused the read. Check the credentials, or `storage_options=`."""


class ThrottledError(StorageError):
    """The store kept asking for fewer requests. Lower `hr.Fetch(concurrency=)`."""


class ReadTimeoutError(StorageError, TimeoutError):
    """No byte arrived in time."""


class ShortReadError(StorageError):
    """Fewer bytes arrived than the store had announced."""


class BadResponseError(StorageError):
    """The response is not the byte range that was requested."""


class ChecksumError(StorageError):
    """The bytes differ from those that were written."""


class ObjectChangedError(StorageError):
    """The object was replaced while it was being read.

    Attributes:
        is_certain: False if only one of two responses had a version: the other may come from a proxy.
    """

    is_certain = True


def not_as_known(url: str, why: str, known_by: str) -> ObjectChangedError:
    """Return the error for an object that differs from the indexed or listed one."""
    return not_as_indexed(url, why) if known_by == "indexed" else not_as_listed(url, why)


def not_as_listed(url: str, why: str) -> ObjectChangedError:
    """Return the error for an object that differs from its listing."""
    mend = "make a new stream with listing='new', and leave objects alone while they are read"
    return ObjectChangedError(f"the object is another than was listed: {why}; {mend}", url=url)


def not_as_indexed(url: str, why: str, key: str | None = None) -> ObjectChangedError:
    """Return the error for a shard that differs from the indexed one."""
    mend = "make a new index (headrace index URL…), or read without one (index=None)"
    return ObjectChangedError(f"the object is another than was indexed: {why}; {mend}", url=url, key=key)


class FormatError(StageError):
    """The bytes do not follow the format.

    Attributes:
        offset: Offset of the damage in the object, in bytes.
    """

    def __init__(
        self,
        message: str,
        *,
        stage: str | None = "scan",
        url: str | None = None,
        key: object = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message, stage=stage, url=url, key=key)
        self.offset = offset

    @classmethod
    def at(cls, url: str, why: str, *, offset: int | None = None) -> Self:
        """Return the error of the object at `url`, whose secrets are hidden."""
        return cls(_named(url, why), url=url, offset=offset)


class LimitError(FormatError):
    """A declared size or count is over its limit."""


class DecodeError(StageError):
    """The bytes of a field cannot be decoded.

    Attributes:
        field: Name of the field.
        offset: Offset of the sample in the shard, in bytes. In a compressed shard: in the decompressed bytes. None if
            samples have no offset.
    """

    def __init__(self, message: str, *, field: str | None = None, url: str | None = None, key: object = None) -> None:
        super().__init__(message, stage="decode", url=url, key=key)
        self.field = field
        self.offset: int | None = None

    def place(self, offset: int | None) -> None:
        """Set the offset of the sample and append it to the message, unless it is set."""
        if offset is not None and self.offset is None:
            self.offset = offset
            self.args = (f"{self} (its sample begins at byte {offset})", *self.args[1:])


class CollateError(StageError):
    """Samples cannot be collated into a batch."""


class WorkerDiedError(StageError, RuntimeError):
    """A worker process ended while it worked on a sample, in every attempt at the sample.

    Attributes:
        pid: Process id of the last worker.
        exitcode: Exit status. Minus the signal number if a signal ended the process. None if not known.
    """

    def __init__(
        self,
        message: str,
        *,
        pid: int = 0,
        exitcode: int | None = None,
        url: str | None = None,
        key: object = None,
        batch: int | None = None,
    ) -> None:
        super().__init__(message, stage="work", url=url, key=key, batch=batch)
        self.pid, self.exitcode = pid, exitcode


def _named(url: str, why: str) -> str:
    return f"{masked(url)}{'' if why.startswith((':', ';', ',')) else ' '}{why}"


def is_secret_name(name: str) -> bool:
    """True if a parameter, a header or an option of this name may hold a secret."""
    return _SECRET_NAMES.search(_unquoted(name)) is not None


@lru_cache(maxsize=1024)
def masked(url: str) -> str:
    """Return `url` with everything hidden that may be a secret.

    Hidden are user information, and the values of parameters whose name suggests a secret: in the query, in the
    fragment and after a semicolon in the path. Nameless fragments of web addresses are hidden too. A `pipe:` address
    keeps only the first word of the command. Each link of an fsspec chain and each address inside a parameter is masked
    too.

    If a password may contain a slash, "?" or "#", everything before the last "@" is hidden.
    """
    if command := _PIPE.match(url):
        return _masked_command(command[0], url[command.end() :])
    if not any(mark in url for mark in "?#;@"):
        return url  # most addresses
    links = _LINKS.split(url)
    if len(links) > 1:
        return "::".join(map(masked, links))
    url = _without_user(url)
    end = min((at for at in (url.find("?"), url.find("#")) if at >= 0), default=len(url))
    path = _PATH_PARAMETER.sub(lambda found: f";{found[1]}=***" if is_secret_name(found[1]) else found[0], url[:end])
    return path + _masked_parameters(url[end:], is_web=_WEB.match(url) is not None)


def _masked_command(scheme: str, command: str) -> str:
    first, *others = command.split(None, 1) or [""]
    if not _COMMAND.fullmatch(first):
        return f"{scheme}…" if first else scheme
    return f"{scheme}{first} …" if others else f"{scheme}{first}"


def _without_user(url: str) -> str:
    scheme = _BEFORE_AUTHORITY.match(url)
    if scheme is None or "@" not in url:
        return url
    rest = url[scheme.end() :]
    authority = re.split(r"[/\\?#]", rest, maxsplit=1)[0]
    user, at, host = authority.rpartition("@")
    if _may_be_password(user, host, rest[len(authority) :]):
        return f"{scheme[0]}***@{rest.rpartition('@')[2]}"
    is_shown = not at or user == "***" or (":" not in user and _WITH_CONTAINERS.match(url))
    return url if is_shown else f"{scheme[0]}{rest[len(user) + 1 :]}"


def _may_be_password(user: str, host: str, rest: str) -> bool:
    """True if the apparent host may be the start of a password with a slash, "?" or "#"."""
    if not user and not _PORT.search(host):
        return False
    if _HOST.fullmatch(host) is None:
        return "@" in rest
    is_certain = host.startswith(("localhost", "[")) or "." in host
    if user and not is_certain:
        return "@" in rest
    return _HOST_BEHIND.search(re.split("[?#]", rest, maxsplit=1)[0] if is_certain else rest) is not None


def _masked_parameters(query: str, *, is_web: bool) -> str:
    pieces = re.split("([?#&;])", re.sub(r"://.*@", "://***@", query))
    shown, is_hiding = pieces[0], False
    for mark, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        name, equals, value = piece.partition("=")
        if is_hiding and (mark != "&" or not equals):
            continue  # it may belong to the secret before it
        is_hiding = bool(equals) and is_secret_name(name)
        if is_hiding or _has_secret(value):
            shown += f"{mark}{name}=***"
        elif not equals and (_has_secret(piece) or (mark == "#" and is_web and piece)):
            shown += f"{mark}***"
        else:
            shown += mark + piece
    return shown


def _has_secret(value: str) -> bool:
    """True if a parameter's value has user information or secret parameters of its own."""
    plain = _unquoted(value)
    return ("//" in plain and "@" in plain) or any(map(is_secret_name, _PARAMETER.findall(plain)))


def _unquoted(text: str) -> str:
    """Undo percent escapes, nested ones too."""
    for _ in range(_UNQUOTED_AT_MOST):
        if "%" not in text:
            break
        text = unquote(text)
    return text


def masked_text(text: str, storage_options: Mapping[str, object] | None = None) -> str:
    """Return `text` with addresses masked and values of secret names or options hidden."""
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
    text = _ADDRESS.sub(lambda address: masked(address[0]), text)
    for secret in _secrets(storage_options or {}):
        text = text.replace(secret, "***")
    return _SECRET.sub(lambda secret: f"{secret[1]}***", text)


def _secrets(options: Mapping[str, object], *, is_secret: bool = False) -> Iterator[str]:
    for name, value in options.items():
        hide = is_secret or is_secret_name(str(name)) or str(name) == "headers"
        if isinstance(value, Mapping):
            yield from _secrets(value, is_secret=hide)
        elif hide and len(str(value)) >= _SHORTEST:
            yield str(value)
