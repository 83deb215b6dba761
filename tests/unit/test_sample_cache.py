"""A file of samples gives what was added, or nothing. Fingerprints change with all that may change a result."""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from process.waiting import Trainer, output_of, trainer

import headrace as hr
from headrace.sample_cache.file import FolderPlace, KeepingPlace, SampleFile, place_of, table_end
from headrace.sample_cache.lookup import NotKnownError, ValueDigest
from headrace.torch_compat import serialize

ONE, OTHER = b"1" * 32, b"2" * 32
COUNT = 8


def piece(number: int) -> bytes:
    return bytes([number]) * (5 + number)


def got(file: SampleFile, number: int) -> bytes | None:
    data = file.read(number)
    return None if data is None else data.tobytes()


@pytest.fixture(params=["memory", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> KeepingPlace:
    return place_of(None if request.param == "memory" else tmp_path / "kept", None)


def test_file_returns_added_pieces(place: KeepingPlace) -> None:
    file = place.open(ONE, COUNT)
    assert got(file, 3) is None
    assert file.add(3, b"first")
    assert file.add(3, b"second")
    assert file.add(0, b"")
    assert [got(file, number) for number in range(4)] == [b"", None, None, b"second"]
    assert 3 in file
    assert 2 not in file


def test_folder_is_found_again_and_memory_is_not(tmp_path: Path) -> None:
    for place, is_kept in ((place_of(None, None), False), (place_of(tmp_path, None), True)):
        assert place.open(ONE, COUNT).add(1, b"piece")
        assert (got(place.open(ONE, COUNT), 1) == b"piece") is is_kept
        assert got(place.open(OTHER, COUNT), 1) is None
        assert got(place.open(ONE, COUNT + 1), 1) is None, "a file of another number of samples is replaced"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    file = place_of(folder, None).open(ONE, COUNT)
    for number in range(0, COUNT, 2):
        file.add(number, piece(number))
    (path,) = folder.iterdir()
    return path, path.read_bytes()


@given(data=st.data())
def test_damage_never_changes_a_piece(whole: tuple[Path, bytes], data: st.DataObject) -> None:
    path, written = whole
    changed = bytearray(written)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1)) if changed else 0
        how = data.draw(st.sampled_from(["byte", "cut", "zeros", "moved"]))
        if how == "cut":
            del changed[at:]
        elif how == "zeros":
            changed[at : at + 64] = bytes(len(changed[at : at + 64]))
        elif how == "moved":  # an entry of another number
            changed[at : at + 24] = changed[48 : 48 + 24]
        elif changed:
            changed[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    file = place_of(path.parent, None).open(ONE, COUNT)
    for number in range(COUNT):
        assert got(file, number) in (None, piece(number) if number % 2 == 0 else None)
        assert file.add(number, piece(number + 1))
        assert got(file, number) == piece(number + 1)


def test_truncated_open_file_returns_nothing(tmp_path: Path) -> None:
    file = place_of(tmp_path, None).open(ONE, COUNT)
    file.add(1, b"piece")
    (path,) = tmp_path.iterdir()
    for length in (table_end(COUNT) + 2, 10):
        os.truncate(path, length)
        assert got(file, 1) is None


@pytest.mark.parametrize("is_folder", [False, True])
def test_piece_without_room_is_not_kept(tmp_path: Path, is_folder: bool) -> None:
    place = place_of(tmp_path if is_folder else None, table_end(COUNT) + 10)
    file = place.open(ONE, COUNT)
    assert file.add(0, b"12345")
    assert not file.add(1, b"123456")
    assert file.add(2, b"12345")
    assert [got(file, number) for number in range(3)] == [b"12345", None, b"12345"]
    assert file.nbytes == table_end(COUNT) + 10


def test_least_recently_used_closed_files_make_room(tmp_path: Path) -> None:
    def left() -> set[str]:
        return {bytes.fromhex(path.stem).decode()[0] for path in tmp_path.iterdir()}

    size = table_end(COUNT) + 100
    place = place_of(tmp_path, 3 * size)
    held = place.open(b"h" * 32, COUNT)
    held.add(0, bytes(100))
    for number, identity in enumerate((b"a" * 32, b"b" * 32)):
        place.open(identity, COUNT).add(0, bytes(100))
        (path,) = tmp_path.glob(f"{identity.hex()[:40]}*")
        os.utime(path, (number, number))
    newest = place.open(b"n" * 32, COUNT)
    assert newest.add(0, bytes(100))
    assert left() == {"h", "b", "n"}
    assert not newest.add(1, bytes(2 * size))  # also without the other one: one of them is in use
    assert newest.add(1, bytes(size))
    assert left() == {"h", "n"}
    assert got(held, 0) == bytes(100)


def test_folder_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place_of(tmp_path, None).open(ONE, COUNT).add(1, b"piece")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="another user's"):
        place_of(tmp_path, None).open(ONE, COUNT)


def test_unfinished_files_are_removed_after_an_hour(tmp_path: Path) -> None:
    for name in ("old.part", "new.part"):
        (tmp_path / name).touch()
    os.utime(tmp_path / "old.part", (0, 0))
    place_of(tmp_path, None).open(ONE, COUNT).add(1, b"piece")
    assert [path.name for path in tmp_path.glob("*.part")] == ["new.part"]


ADDING = """
import random
from headrace.sample_cache.file import place_of

def piece(number):
    return random.Random(number).randbytes(200 + 13 * number)

file, rng = place_of({folder!r}, None).open(b"1" * 32, 500), random.Random({seed})
print("ready", flush=True)
while {is_endless} or not all(n in file for n in range(500)):
    number = rng.randrange(500)
    data = file.read(number)
    assert data is None or data.tobytes() == piece(number), "wrong bytes"
    if data is None:
        assert file.add(number, piece(number))
        assert file.read(number).tobytes() == piece(number)
"""


@pytest.mark.slow
@pytest.mark.process
def test_processes_fill_one_file_despite_kills(tmp_path: Path) -> None:
    def adding(seed: int, *, is_endless: bool) -> AbstractContextManager[Trainer]:
        return trainer(ADDING.format(folder=str(tmp_path), seed=seed, is_endless=is_endless), preamble="")

    for seed in range(3):
        with adding(seed, is_endless=True) as killed:  # at the end of the block
            assert killed.line() == "ready"
    with ExitStack() as running:
        each = [running.enter_context(adding(seed, is_endless=False)) for seed in range(10, 13)]
        assert [process.finish(100) for process in each] == [(0, "ready\n", "")] * 3
    (path,) = tmp_path.iterdir()
    assert path.suffix == ".samples"
    assert isinstance(place_of(tmp_path, None), FolderPlace)


def digest(*values: object) -> bytes:
    return ValueDigest().of(values)


def draws_of(function: object) -> object:
    found = ValueDigest()
    found.of(function)
    return found.draws


def made(source: str, name: str = "f") -> Any:
    module = ModuleType("script")
    exec(source, vars(module))
    return vars(module)[name]


A = "class A:\n def "
PARTIAL = "import functools\ndef g(x, k): return x + k\nf = functools.partial(g, k={})"
NUMPY, TORCH = "import numpy as np\n", "import torch\n"
ENUM = "import enum\nclass E(enum.Enum):\n A = 1\n"
# Sources with a gap, and two texts for it.
CHANGES = {
    "body": ("def f(x): return x {} 1", "+", "-"),
    "constant": ("def f(x): return x + {}", 1, 2),
    "type of a constant": ("def f(x): return x + {}", 1, 1.0),
    "name that is called": ("def f(x): return x.{}()", "upper", "lower"),
    "default": ("def f(x, y={}): return x + y", 1, 2),
    "keyword's default": ("def f(x, *, y={}): return x + y", 1, 2),
    "global": ("K = {}\ndef f(x): return x + K", 1, 2),
    "global of a lambda in it": ("K = {}\ndef f(x): return (lambda: K)()", 1, 2),
    "global in a comprehension": ("K = {}\ndef f(x): return [K for _ in x]", 1, 2),
    "closure": ("def g(k):\n def f(x): return x + k\n return f\nf = g({})", 1, 2),
    "helper's body": ("def h(x): return x + {}\ndef f(x): return h(x)", 1, 2),
    "helper's helper": ("K = {}\ndef i(x): return K\ndef h(x): return i(x)\ndef f(x): return h(x)", 1, 2),
    "method": (A + "__call__(self, x): return x + {}\nf = A()", 1, 2),
    "method of a base": (A + "g(s, x): return x + {}\nclass B(A):\n def __call__(s, x): return s.g(x)\nf = B()", 1, 2),
    "static method": ("class A:\n @staticmethod\n def g(x): return {}\ndef f(x): return A.g(x)", 1, 2),
    "property": ("class A:\n @property\n def g(self): return {}\ndef f(x): return A().g", 1, 2),
    "attribute": (A + "__init__(self, k): self.k = k\n def __call__(self, x): return x + self.k\nf = A({})", 1, 2),
    "attribute in a slot": (A + "__call__(self, x): return x + self.k\n __slots__ = 'k'\nf = A()\nf.k = {}", 1, 2),
    "attribute of a class": ("class A:\n k = {}\n def __call__(self, x): return x + self.k\nf = A()", 1, 2),
    "member of an enumeration": ("import enum\nclass E(enum.Enum):\n A = {}\ndef f(x): return E.A.value", 1, 2),
    "argument of a partial": (PARTIAL, 1, 2),
    "function in a decorator": ("import functools\n@functools.lru_cache\ndef f(x): return x + {}", 1, 2),
    "array": (NUMPY + "K = np.arange(9){}\ndef f(x): return x + K", "", "[::-1]"),
    "shape of an array": (NUMPY + "K = np.arange(6).reshape{}\ndef f(x): return x + K", (2, 3), (3, 2)),
    "type of an array": (NUMPY + "K = np.zeros(8, np.{})\ndef f(x): return x + K", "int8", "uint8"),
    "tensor": (TORCH + "K = torch.tensor([{}])\ndef f(x): return x + K", 1.0, 2.0),
    "array's method": (NUMPY + "class A(np.ndarray): g = lambda s: {}\nK = np.ones(2).view(A)\ndef f(): K.g()", 1, 2),
    "tensor's method": (TORCH + "class A(torch.Tensor):\n def g(s): return {}\nK = A([2])\nf = lambda: K.g()", 1, 2),
    "attribute of a tensor": (TORCH + "K = torch.zeros(2)\nK.unit = '{}'\ndef f(x): return K.unit", "m", "s"),
    "private method of an enumeration": (ENUM + " def _g(self): return {}\ndef f(x): return E.A._g()", 1, 2),
    "text of an enumeration": (ENUM + " def __str__(self): return '{}'\ndef f(x): return str(E.A)", "a", "b"),
    "order of a dict": ("K = {}\ndef f(x): return K", {1: 2, 3: 4}, {3: 4, 1: 2}),
    "order of arguments": ("def f({}): return x - y", "x, y", "y, x"),
    "name of a library": (NUMPY + "def f(x): return np.{}(x)", "sin", "cos"),
    "import in it": ("def f(x):\n from math import {0}\n return {0}(x)", "sin", "cos"),
    "exceptions that it catches": ("def f(x):\n try: return x()\n except {}: return 0", "KeyError", "ValueError"),
}
SOURCES = {name: (source.format(before), source.format(after)) for name, (source, before, after) in CHANGES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("what", SOURCES)
def test_fingerprint_depends_on_the_source_alone(what: str) -> None:
    before, after = SOURCES[what]
    function = made(before)
    assert digest(function) != digest(made(after))
    assert digest(function) == digest(made("# first\n\n" + before))
    assert digest(serialize.copied(function)) == digest(function)


def test_fingerprint_includes_later_changes_of_globals() -> None:
    function = made("K = [1]\ndef f(x): return x + K[0]")
    before = digest(function)
    function.__globals__["K"].append(2)
    assert digest(function) != before


LOCK, GENERATOR, VIEW = threading.Lock(), (n for n in ()), memoryview(b"")
SETS = "NAMES = {'a', 'b', 'c', 1, (2, 'd')}\ndef f(x): return x in {'p', 'q', 'r'} or x in NAMES"


@pytest.mark.slow
@pytest.mark.process
def test_fingerprint_is_the_same_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, source in enumerate(sources := [SETS, *(before for before, _ in SOURCES.values())]):
        (tmp_path / f"own_module_{number}.py").write_text(source)
    script = f"""
import importlib, sys
from types import ModuleType
from headrace.sample_cache.lookup import ValueDigest
sys.path.insert(0, {str(tmp_path)!r})
print(*{{*"abcdefgh"}})
for number, source in enumerate({sources!r}):
    module = ModuleType("script")
    exec(source, vars(module))
    for found in (module, importlib.import_module(f"own_module_{{number}}")):
        print("digest", number, ValueDigest().of(found.f).hex())
"""
    printed = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        printed.append(output_of(script, preamble=""))
    orders, digests = zip(*(text.split("\n", 1) for text in printed), strict=True)
    assert orders[0] != orders[1]
    assert digests[0] == digests[1]
    assert digests[0].count("digest") == 2 * len(sources)


def test_functions_that_refer_to_themselves_have_fingerprints() -> None:
    one = made("def f(x): return f(x - 1) if x else K\nK = []\nK.append(K)")
    other = made("def f(x): return f(x - 2) if x else K\nK = []\nK.append(K)")
    assert digest(one) != digest(other)


def test_fingerprint_includes_only_used_names_of_own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_helpers.py").write_text("K = 1\nOTHER = 1\ndef helper(x): return x + K\n")
    monkeypatch.syspath_prepend(tmp_path)
    import own_helpers  # type: ignore[import-not-found]

    monkeypatch.setitem(sys.modules, "own_helpers", own_helpers)
    function = made("import own_helpers\ndef f(x): return own_helpers.helper(x)")
    before = digest(function)
    own_helpers.OTHER = 2
    assert digest(function) == before
    own_helpers.K = 2
    assert digest(function) != before


@pytest.mark.parametrize(
    "import_it",
    ["from own_package import helpers", "import own_package.helpers as helpers", "import own_package.helpers"],
)
def test_import_in_a_function_is_refused(import_it: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").touch()
    (tmp_path / "own_package" / "helpers.py").write_text("K = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotKnownError, match="import it at the top of its file"):
        digest(made(f"def f(x):\n {import_it}\n return x"))


@pytest.mark.process
def test_own_module_may_have_the_name_of_a_python_module(tmp_path: Path) -> None:
    script = (
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nsys.dont_write_bytecode = True\n"
        "import chunk\nfrom headrace.sample_cache.lookup import ValueDigest\ndef f(x): return chunk.helper(x)\n"
        "print(ValueDigest().of(f).hex())"
    )
    printed = set[str]()
    for number in (1, 2):
        (tmp_path / "chunk.py").write_text(f"def helper(x): return x + {number}\n")
        printed.add(output_of(script, preamble=""))
    assert len(printed) == 2


@pytest.mark.parametrize(("function", "why"), [
    (lambda: LOCK, None),
    (lambda: GENERATOR, None),
    (lambda: VIEW, None),
    (made("K = 1\ndef f(x): return x + globals()['K']"), "as texts"),
    (made("K = 1\ndef f(x): return x + eval('K')"), "as texts"),
    (made("K = 1\ndef f(x): return x + __import__('script').K"), "as texts"),
])  # fmt: skip
def test_function_with_unknown_dependencies_is_refused(function: object, why: str | None) -> None:
    with pytest.raises(NotKnownError, match=why):
        digest(function)


@pytest.mark.parametrize("function", [
    lambda x: x + random.random(),
    lambda x: x + np.random.rand(),  # noqa: NPY002
    lambda x: x + np.random.default_rng().random(),
    lambda x: x + torch.rand(()),
    lambda x: torch.empty(3).uniform_(),
    lambda x: x + hr.rng().random(),
    random.random,
    np.random.rand,
    torch.randperm,
    hr.rng,
    functools.partial(np.random.default_rng(1).permuted, axis=0),
    made("def f(x):\n from random import gauss\n return gauss(x, 1)"),
    made("def f(x):\n from numpy import random\n return random.normal(x)"),
    made("def f(x):\n import numpy.random as draws\n return draws.normal(x)"),
    made("from numpy.random import rand\ndef g(x): return rand()\ndef f(x): return g(x)"),
    made("import random\n" + A + "__init__(self): self.r = random.Random(1)\n def __call__(self, x): ...\nf = A()"),
])  # fmt: skip
def test_random_draws_are_found(function: object) -> None:
    assert draws_of(function) is not None


@pytest.mark.parametrize("function", [lambda x: torch.stack([x]), np.sin, len, torch.nn.Linear(2, 2), "".join, sorted])
def test_no_random_draws_are_found_where_there_are_none(function: object) -> None:
    assert draws_of(function) is None
