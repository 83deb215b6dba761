"""What tells functions apart: it changes with all that may change what they give, and with nothing else."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import headrace as hr
from headrace.sample_cache.fingerprint import NotKnownError, ValueDigest
from headrace.torch_compat import serialize


def digest(*values: object) -> bytes:
    return ValueDigest().of(values)


def made(source: str, name: str = "f") -> Any:
    module = ModuleType("script")
    exec(source, vars(module))
    return vars(module)[name]


FUNCTION = "def f(x): return x + 1"
CHANGES = {
    "body": (FUNCTION, "def f(x): return x - 1"),
    "constant": (FUNCTION, "def f(x): return x + 2"),
    "type of a constant": (FUNCTION, "def f(x): return x + 1.0"),
    "name that is called": ("def f(x): return x.upper()", "def f(x): return x.lower()"),
    "default": ("def f(x, y=1): return x + y", "def f(x, y=2): return x + y"),
    "keyword's default": ("def f(x, *, y=1): return x + y", "def f(x, *, y=2): return x + y"),
    "global": ("K = 1\ndef f(x): return x + K", "K = 2\ndef f(x): return x + K"),
    "global of a lambda in it": ("K = 1\ndef f(x): return (lambda: K)()", "K = 2\ndef f(x): return (lambda: K)()"),
    "global in a comprehension": ("K = 1\ndef f(x): return [K for _ in x]", "K = 2\ndef f(x): return [K for _ in x]"),
    "what it closes over": (
        "def g(k):\n def f(x): return x + k\n return f\nf = g(1)",
        "def g(k):\n def f(x): return x + k\n return f\nf = g(2)",
    ),
    "helper's body": (
        "def h(x): return x + 1\ndef f(x): return h(x)",
        "def h(x): return x + 2\ndef f(x): return h(x)",
    ),
    "helper's helper": (
        "K = 1\ndef i(x): return K\ndef h(x): return i(x)\ndef f(x): return h(x)",
        "K = 2\ndef i(x): return K\ndef h(x): return i(x)\ndef f(x): return h(x)",
    ),
    "method": (
        "class A:\n def __call__(self, x): return x + 1\nf = A()",
        "class A:\n def __call__(self, x): return x + 2\nf = A()",
    ),
    "method of a base": (
        "class A:\n def g(self, x): return x + 1\nclass B(A):\n def __call__(self, x): return self.g(x)\nf = B()",
        "class A:\n def g(self, x): return x + 2\nclass B(A):\n def __call__(self, x): return self.g(x)\nf = B()",
    ),
    "static method": (
        "class A:\n @staticmethod\n def g(x): return 1\ndef f(x): return A.g(x)",
        "class A:\n @staticmethod\n def g(x): return 2\ndef f(x): return A.g(x)",
    ),
    "property": (
        "class A:\n @property\n def g(self): return 1\ndef f(x): return A().g",
        "class A:\n @property\n def g(self): return 2\ndef f(x): return A().g",
    ),
    "attribute": (
        "class A:\n def __init__(self, k): self.k = k\n def __call__(self, x): return x + self.k\nf = A(1)",
        "class A:\n def __init__(self, k): self.k = k\n def __call__(self, x): return x + self.k\nf = A(2)",
    ),
    "attribute in a slot": (
        "class A:\n __slots__ = ('k',)\n def __call__(self, x): return x + self.k\nf = A()\nf.k = 1",
        "class A:\n __slots__ = ('k',)\n def __call__(self, x): return x + self.k\nf = A()\nf.k = 2",
    ),
    "attribute of a class": (
        "class A:\n k = 1\n def __call__(self, x): return x + self.k\nf = A()",
        "class A:\n k = 2\n def __call__(self, x): return x + self.k\nf = A()",
    ),
    "member of an enumeration": (
        "import enum\nclass E(enum.Enum):\n A = 1\ndef f(x): return E.A.value",
        "import enum\nclass E(enum.Enum):\n A = 2\ndef f(x): return E.A.value",
    ),
    "argument of a partial": (
        "import functools\ndef g(x, k): return x + k\nf = functools.partial(g, k=1)",
        "import functools\ndef g(x, k): return x + k\nf = functools.partial(g, k=2)",
    ),
    "function in a decorator": (
        "import functools\n@functools.lru_cache\ndef f(x): return x + 1",
        "import functools\n@functools.lru_cache\ndef f(x): return x + 2",
    ),
    "array": (
        "import numpy as np\nK = np.arange(9)\ndef f(x): return x + K",
        "import numpy as np\nK = np.arange(9)[::-1]\ndef f(x): return x + K",
    ),
    "shape of an array": (
        "import numpy as np\nK = np.arange(6).reshape(2, 3)\ndef f(x): return x + K",
        "import numpy as np\nK = np.arange(6).reshape(3, 2)\ndef f(x): return x + K",
    ),
    "type of an array": (
        "import numpy as np\nK = np.zeros(8, np.int8)\ndef f(x): return x + K",
        "import numpy as np\nK = np.zeros(8, np.uint8)\ndef f(x): return x + K",
    ),
    "tensor": (
        "import torch\nK = torch.tensor([1.0])\ndef f(x): return x + K",
        "import torch\nK = torch.tensor([2.0])\ndef f(x): return x + K",
    ),
    "method of an array's class": (
        "import numpy\nclass A(numpy.ndarray):\n def g(s): return 1\nK = numpy.ones(2).view(A)\nf = lambda x: K.g()",
        "import numpy\nclass A(numpy.ndarray):\n def g(s): return 2\nK = numpy.ones(2).view(A)\nf = lambda x: K.g()",
    ),
    "method of a tensor's class": (
        "import torch\nclass A(torch.Tensor):\n def g(s): return 1\nK = A(torch.ones(2))\nf = lambda x: K.g()",
        "import torch\nclass A(torch.Tensor):\n def g(s): return 2\nK = A(torch.ones(2))\nf = lambda x: K.g()",
    ),
    "attribute of a tensor": (
        "import torch\nK = torch.zeros(2)\nK.unit = 'm'\ndef f(x): return K.unit",
        "import torch\nK = torch.zeros(2)\nK.unit = 's'\ndef f(x): return K.unit",
    ),
    "private method of an enumeration": (
        "import enum\nclass E(enum.Enum):\n A = 1\n def _g(self): return 1\ndef f(x): return E.A._g()",
        "import enum\nclass E(enum.Enum):\n A = 1\n def _g(self): return 2\ndef f(x): return E.A._g()",
    ),
    "text of an enumeration": (
        "import enum\nclass E(enum.Enum):\n A = 1\n def __str__(self): return 'a'\ndef f(x): return str(E.A)",
        "import enum\nclass E(enum.Enum):\n A = 1\n def __str__(self): return 'b'\ndef f(x): return str(E.A)",
    ),
    "order of a dict": ("K = {1: 2, 3: 4}\ndef f(x): return K", "K = {3: 4, 1: 2}\ndef f(x): return K"),
    "order of arguments": ("def f(x, y): return x - y", "def f(y, x): return x - y"),
    "what a library's name is": (
        "import numpy as np\ndef f(x): return np.sin(x)",
        "import numpy as np\ndef f(x): return np.cos(x)",
    ),
    "what is imported in it": (
        "def f(x):\n from math import sin\n return sin(x)",
        "def f(x):\n from math import cos\n return cos(x)",
    ),
    "exceptions that it catches": (
        "def f(x):\n try: return x()\n except KeyError: return 0",
        "def f(x):\n try: return x()\n except ValueError: return 0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_fingerprint_changes_with(what: str) -> None:
    before, after = CHANGES[what]
    assert digest(made(before)) != digest(made(after))


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_fingerprint_stays_where_a_script_only_moves_its_lines(what: str) -> None:
    before, _ = CHANGES[what]
    assert digest(made(before)) == digest(made("# first\n\n" + before))


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_fingerprint_is_the_same_in_a_worker(what: str) -> None:
    function = made(CHANGES[what][0])
    assert digest(serialize.copied(function)) == digest(function)


def test_fingerprint_sees_a_global_that_changes_later() -> None:
    function = made("K = [1]\ndef f(x): return x + K[0]")
    before = digest(function)
    function.__globals__["K"].append(2)
    assert digest(function) != before


SETS = "NAMES = {'a', 'b', 'c', 1, (2, 'd')}\ndef f(x): return x in {'p', 'q', 'r'} or x in NAMES"


def in_new_process(script: Path, *, hash_seed: str = "0") -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    return subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.process
def test_fingerprint_is_the_same_in_every_process(tmp_path: Path) -> None:
    for number, source in enumerate(sources := [SETS, *(before for before, _ in CHANGES.values())]):
        (tmp_path / f"own_module_{number}.py").write_text(source)
    script = f"""
import importlib
from types import ModuleType
from headrace.sample_cache.fingerprint import ValueDigest
print(len({{*"abc"}}), *{{*"abcdefgh"}})
for number, source in enumerate({sources!r}):
    module = ModuleType("script")
    exec(source, vars(module))
    for found in (module, importlib.import_module(f"own_module_{{number}}")):
        print("digest", number, ValueDigest().of(found.f).hex())
"""
    (tmp_path / "script.py").write_text(script)
    printed = [in_new_process(tmp_path / "script.py", hash_seed=seed) for seed in ("1", "2")]
    orders, digests = zip(*(text.split("\n", 1) for text in printed), strict=True)
    assert orders[0] != orders[1]
    assert digests[0] == digests[1]
    assert digests[0].count("digest") == 2 * len(sources)


def test_what_refers_to_itself_is_told() -> None:
    one = made("def f(x): return f(x - 1) if x else K\nK = []\nK.append(K)")
    other = made("def f(x): return f(x - 2) if x else K\nK = []\nK.append(K)")
    assert digest(one) != digest(other)


def test_module_of_ones_own_is_told_by_what_is_used_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_module_of_ones_own_that_a_function_imports_is_refused(
    import_it: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").touch()
    (tmp_path / "own_package" / "helpers.py").write_text("K = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotKnownError, match="import it at the top of its file"):
        digest(made(f"def f(x):\n {import_it}\n return x"))


@pytest.mark.process
def test_module_that_has_the_name_of_one_of_python_is_ones_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import chunk\nfrom headrace.sample_cache.fingerprint import ValueDigest\ndef f(x): return chunk.helper(x)\n"
        "print(ValueDigest().of(f).hex())"
    )
    printed = set()
    for number in (1, 2):
        (tmp_path / "chunk.py").write_text(f"def helper(x): return x + {number}\n")
        printed.add(in_new_process(script))
    assert len(printed) == 2


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), (n for n in ()), memoryview(b"")],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_told_is_refused(value: object) -> None:
    with pytest.raises(NotKnownError):
        digest(lambda: value)


@pytest.mark.parametrize(
    "found",
    [
        "globals()['K']",
        "eval('K')",
        "__import__('script').K",
    ],
)
def test_what_is_found_by_its_name_as_a_text_is_refused(found: str) -> None:
    with pytest.raises(NotKnownError, match="as texts"):
        digest(made(f"K = 1\ndef f(x): return x + {found}"))


@pytest.mark.parametrize(
    "function",
    [
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
        made(
            "import random\nclass A:\n def __init__(self): self.r = random.Random(1)\n"
            " def __call__(self, x): ...\nf = A()"
        ),
    ],
)
def test_random_numbers_are_seen(function: object) -> None:
    found = ValueDigest()
    found.of(function)
    assert found.draws is not None


@pytest.mark.parametrize("function", [lambda x: torch.stack([x]), np.sin, len, torch.nn.Linear(2, 2), "".join, sorted])
def test_random_numbers_are_not_seen_where_there_are_none(function: object) -> None:
    found = ValueDigest()
    found.of(function)
    assert found.draws is None
