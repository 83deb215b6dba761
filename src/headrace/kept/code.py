"""Functions' code: what of it makes a difference, and which names it looks up elsewhere."""

from __future__ import annotations

import dis
import functools
import hashlib
import marshal
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

from headrace.kept.draws import drawn_in

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")


class Outside(NamedTuple):
    """A name that code looks up outside of itself.

    Attributes:
        name: the global's; or the module's that is imported.
        attributes: those that are asked for, one of the other, right behind it.
        imported: None: it is a global. Else what is imported of the module, which is `level` packages up.
    """

    name: str
    attributes: tuple[str, ...] = ()
    imported: tuple[str, ...] | None = None
    level: int = 0


class Code(NamedTuple):
    """What is known of code.

    Attributes:
        digest: of all that makes a difference in it: not of its names, nor of the lines that it stands in.
        outside: what it looks up, and the functions in it.
        draws: what in it makes random numbers by the look of it, if anything does.
    """

    digest: bytes
    outside: tuple[Outside, ...]
    draws: str | None


@functools.lru_cache(4096)
def code_of(code: CodeType) -> Code:
    """What is known of the code of a function, with that of the functions in it."""
    digest = hashlib.blake2b(digest_size=32)
    inner = [code_of(part) for part in code.co_consts if type(part) is CodeType]
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    for part in (counts, names, code.co_code, getattr(code, "co_exceptiontable", b"")):
        digest.update(marshal.dumps(part, 0) + b"|")
    for constant in code.co_consts:
        digest.update(b"code" if type(constant) is CodeType else b"%a" % [_constant(constant)])
    for part in inner:
        digest.update(part.digest)
    outside = dict.fromkeys([*_outside(code), *(name for part in inner for name in part.outside)])
    draws = drawn_in(code.co_names) or next((part.draws for part in inner if part.draws), None)
    return Code(digest.digest(), tuple(outside), draws)


def _constant(constant: object) -> object:
    """What prints the same in each process: sets do not."""
    if type(constant) is frozenset:
        return "frozenset", sorted(map(repr, constant))
    return tuple(map(_constant, constant)) if type(constant) is tuple else (type(constant).__name__, repr(constant))


def _outside(code: CodeType) -> Iterator[Outside]:
    instructions = [found for found in dis.get_instructions(code) if found.opname not in ("EXTENDED_ARG", "CACHE")]
    for k, found in enumerate(instructions):
        if found.opname in _GLOBALS:
            attributes = []
            for following in instructions[k + 1 :]:
                if following.opname not in _ATTRIBUTES:
                    break
                attributes.append(following.argval)
            yield Outside(found.argval, tuple(attributes))
        elif found.opname == "IMPORT_NAME":
            level, names = (before.argval for before in instructions[k - 2 : k])  # what it takes from the stack
            yield Outside(found.argval, imported=names or (), level=level)
