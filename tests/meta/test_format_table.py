"""The registry describes headrace's own formats as their modules do, and imports no module for another format."""

import importlib
import json
import pkgutil
import subprocess
import sys

import pytest

import headrace.formats
from headrace.formats.format import Format
from headrace.formats.registry import KnownFormat, known_formats

OURS = [known for known in known_formats().values() if type(known.load()).__module__.startswith("headrace.")]
PROBE = """
import json, sys
import headrace as hr
hr.stream(["a/{000..999}.tar", "a/x.TAR"], index=None)
print(json.dumps(sorted(sys.modules)))
hr.stream(["a.jsonl.gz", "b.jsonl"])
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("known", OURS, ids=lambda known: known.name)
def test_registry_describes_the_format_as_its_module(known: KnownFormat) -> None:
    form = known.load()
    assert (known.name, known.suffixes, known.catalogue) == (form.name, form.suffixes, form.catalogue)


def test_registry_has_each_format_that_a_module_offers() -> None:
    modules = [name for _, name, _ in pkgutil.walk_packages(headrace.formats.__path__, "headrace.formats.")]
    assert len(modules) > 30
    values = (value for name in modules for value in vars(importlib.import_module(name)).values())
    offered = {id(value): value.name for value in values if isinstance(value, Format) and not isinstance(value, type)}
    assert offered == {id(form): form.name for form in (known.load() for known in OURS)}


def test_streams_import_the_module_of_their_own_format_alone() -> None:
    said = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=50).stdout
    modules = {known.name: type(known.load()).__module__ for known in OURS}
    of_tar, of_both = map(json.loads, said.splitlines())
    assert {name for name, module in modules.items() if module in of_tar} == {"tar"}
    assert {name for name, module in modules.items() if module in of_both} == {"tar", "jsonl", "text"}
