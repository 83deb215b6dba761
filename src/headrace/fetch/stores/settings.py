"""Normalizes `storage_options` for obstore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace._util import check
from headrace.errors import OptionError

_SWITCHES = frozenset({"allow_http", "allow_invalid_certificates", "http1_only", "http2_only", "randomize_addresses"})
_OF_CLIENT = _SWITCHES | {
    "connect_timeout", "default_content_type", "default_headers", "http2_keep_alive_interval",
    "http2_keep_alive_timeout", "http2_keep_alive_while_idle", "pool_idle_timeout", "pool_max_idle_per_host",
    "proxy_ca_certificate", "proxy_excludes", "proxy_url", "read_timeout", "root_certificate", "timeout", "user_agent",
}  # fmt: skip
_PREFIXES = ("aws_", "azure_", "google_")
_ON, _OFF = ("true", "1", "on", "yes", "y", "t"), ("false", "0", "off", "no", "n", "f")


def for_obstore(options: Mapping[str, Any]) -> dict[str, Any]:
    """Move client settings of any spelling to `client_options`, and convert switches to bool.

    obstore's documentation has `allow_http` in either place, in any case, with a store's prefix, and as text. Its Rust
    code panics on such a setting among those of the store.

    Raises:
        OptionError: a setting is given twice, or a switch is neither true nor false.
    """
    given = options.get("client_options")
    if given is not None and not isinstance(given, Mapping):
        raise check.invalid("storage_options['client_options']", given, "a dict")
    rest: dict[str, object] = {}
    client = {}
    for name, value in (given or {}).items():
        client[name.lower()] = _checked(f"client_options[{name!r}]", name.lower(), value)
    for name, value in options.items():
        plain = _plain(name)
        if plain in _OF_CLIENT:
            setting = _checked(repr(name), plain, value)
            if client.setdefault(plain, setting) != setting:
                raise OptionError(f"storage_options give {plain!r} twice, and not the same: keep it in client_options")
        elif name != "client_options":
            rest[name] = value
    return {**rest, "client_options": client} if client else rest


def _plain(name: str) -> str:
    plain = name.lower()
    return next((plain.removeprefix(prefix) for prefix in _PREFIXES if plain.startswith(prefix)), plain)


def _checked(where: str, name: str, value: object) -> object:
    if name not in _SWITCHES:
        return value
    text = str(value).strip().lower()
    if text not in _ON + _OFF:
        raise check.invalid(f"storage_options {where}", text, "true or false")
    return text in _ON
