"""The meaning of HTTP statuses and error codes, for the HTTP client and for obstore."""

from __future__ import annotations

import re

from headrace.errors import AccessDeniedError, ObjectChangedError, ObjectMissingError, StorageError, ThrottledError

_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_THROTTLES = frozenset({"SlowDown", "ServerBusy", "RequestLimitExceeded", "Throttling", "ThrottlingException"})
_EXPIRED = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
# Values of Content-Encoding that change no byte. Uploads in signed chunks leave aws-chunked.
_PLAIN_ENCODINGS = frozenset({"", "identity", "aws-chunked"})


def code_in(text: str) -> str | None:
    """Return the code in an S3 error body, the only part of the body that is ever shown."""
    match = _CODE.search(text)
    return match[1] if match else None


def is_plain(encoding: str) -> bool:
    """True if a body with this Content-Encoding has the object's bytes as stored."""
    return all(part.strip().lower() in _PLAIN_ENCODINGS for part in encoding.split(","))


def encoded(encoding: str) -> str:
    return (
        f"its body has Content-Encoding {encoding[:40]!r}, so no range of it can be read: store the object without "
        "this header, and under a name that ends in .gz if its bytes are compressed"
    )


def refusal(
    status: int, code: str | None, *, url: str, retry_after_s: float | None = None, hint: str = ""
) -> StorageError:
    kind, reason = _meaning(status, code)
    said = f"{status} {code}" if code else f"{status}"
    return kind(f"{reason}: {said}{hint}", url=url, status=status, retry_after_s=retry_after_s)


def _meaning(status: int, code: str | None) -> tuple[type[StorageError], str]:
    if status in (404, 410):
        return ObjectMissingError, "no such object"
    if status in (401, 403) or code in _EXPIRED:
        return AccessDeniedError, "the store refused the read"
    if status == 412:
        return ObjectChangedError, (
            "the object no longer has the ETag it had: it was replaced, or mirrors with ETags of their own answer for "
            "one address; then name one mirror"
        )
    if status in (429, 503) or code in _THROTTLES:
        return ThrottledError, "the store asks for fewer requests"
    return StorageError, "the store answered"
