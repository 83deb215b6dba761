"""A web server with injected faults, for testing stores and clients. See `python -m`."""

from __future__ import annotations

from headrace.testing.fault_server.answers import Request
from headrace.testing.fault_server.faults import FAULTS
from headrace.testing.fault_server.rules import When
from headrace.testing.fault_server.server import FaultServer

__all__ = ["FAULTS", "FaultServer", "Request", "When"]
