"""For people who write a store, a format or a data set: contract tests to inherit, and a server that fails on purpose.

A contract is a class of `test_…` methods. Inherit it in a class whose name your runner collects, and give what it asks
for; no contract needs a test runner of its own.
"""

from __future__ import annotations

from headrace.testing.decoders import DecoderContract
from headrace.testing.executors import ExecutorContract
from headrace.testing.fault_server import FaultServer
from headrace.testing.formats import FormatContract
from headrace.testing.operators import OperatorContract
from headrace.testing.stores import StoreContract

__all__ = [
    "DecoderContract",
    "ExecutorContract",
    "FaultServer",
    "FormatContract",
    "OperatorContract",
    "StoreContract",
]
