"""Panics of Rust libraries: no `Exception` in Python, but each should fail only one read."""

from __future__ import annotations

from headrace.errors import StorageError

_KINDS = ("pyo3_runtime.PanicException", "pyo3_async_runtimes.RustPanic")


def panic_in(error: BaseException, url: str, store: object) -> StorageError | None:
    """Return a StorageError for a Rust panic, or None. Panic classes are compared by name."""
    if not any(f"{kind.__module__}.{kind.__name__}" in _KINDS for kind in type(error).__mro__):
        return None
    said = str(error).partition("\n")[0][:200]
    return StorageError(f"{type(store).__name__}: a library in Rust, which it reads with, panicked: {said}", url=url)
