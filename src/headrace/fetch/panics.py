"""Panics of libraries in Rust: no `Exception` in Python, and no reason to end more than the read that met one."""

from __future__ import annotations

from headrace.errors import StorageError

_KINDS = ("pyo3_runtime.PanicException", "pyo3_async_runtimes.RustPanic")


def panic_in(error: BaseException, url: str, store: object) -> StorageError | None:
    """The error of ours for a panic in a store; None where it is none.

    Each extension has a class of its own for them, which is nowhere to be imported from.
    """
    if not any(f"{kind.__module__}.{kind.__name__}" in _KINDS for kind in type(error).__mro__):
        return None
    said = str(error).partition("\n")[0][:200]
    return StorageError(f"{type(store).__name__}: a library in Rust, which it reads with, panicked: {said}", url=url)
