"""A web server that fails on purpose, for people who write stores and clients; `python -m` runs it over a folder."""

from __future__ import annotations

from headrace.testing.fault_server.answers import Request
from headrace.testing.fault_server.faults import FAULTS
from headrace.testing.fault_server.rules import When
from headrace.testing.fault_server.server import FaultServer

__all__ = ["FAULTS", "FaultServer", "Request", "When"]
