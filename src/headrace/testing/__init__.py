"""Contract tests for stores, formats, decoders, operators, executors; and a faulty server.

A contract is a class of `test_…` methods. Inherit it in a class whose name your test runner collects, and implement its
abstract attributes and methods. No contract needs a particular test runner.
"""

from __future__ import annotations

from headrace.testing.decoders import DecoderContract
from headrace.testing.executors import ExecutorContract
from headrace.testing.fault_server.server import FaultServer
from headrace.testing.formats import FormatContract
from headrace.testing.operators import OperatorContract
from headrace.testing.stores import StoreContract

__all__ = ["DecoderContract", "ExecutorContract", "FaultServer", "FormatContract", "OperatorContract", "StoreContract"]
