"""Text that others have written, without what looks like a secret."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from headrace.errors import masked

_WORDS = "(?:token|password|passwd|secret|signature|credential|key|auth)"
_NAMES = re.compile(_WORDS, re.IGNORECASE)
_ADDRESS = re.compile(r"(?<![\w+.-])[A-Za-z][A-Za-z0-9+.-]+://[^\s'\"]+")
_NAMED = rf"(?<![\w-])--?[\w-]*{_WORDS}[\w-]*\s+|{_WORDS}[\w-]*['\"]?\s*[=:]\s*"
_SECRET = re.compile(rf"(?i)((?:{_NAMED})(?:(?:bearer|basic)\s+)?|\b(?:bearer|basic)\s+)\S+")
_LONGEST = 2048  # of what others say, so that looking through it takes no time
_SHORTEST = 4  # to hide shorter ones would hide half of the text


def masked_text(text: str, storage_options: Mapping[str, object] | None = None) -> str:
    """`text` with its addresses masked, and without values that have the name of a secret, there or in the options."""
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
    text = _ADDRESS.sub(lambda address: masked(address[0]), text)
    for secret in _secrets(storage_options or {}):
        text = text.replace(secret, "***")
    return _SECRET.sub(lambda secret: f"{secret[1]}***", text)


def _secrets(options: Mapping[str, object], *, is_secret: bool = False) -> Iterator[str]:
    for name, value in options.items():
        hide = is_secret or _NAMES.search(str(name)) is not None or str(name) == "headers"
        if isinstance(value, Mapping):
            yield from _secrets(value, is_secret=hide)
        elif hide and len(str(value)) >= _SHORTEST:
            yield str(value)
