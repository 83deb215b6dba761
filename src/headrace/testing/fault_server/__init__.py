"""A web server with injected faults, for testing stores and clients. See `python -m`."""

from __future__ import annotations

from headrace.testing.fault_server.faults import FAULTS, Request
from headrace.testing.fault_server.server import FaultServer, When

__all__ = ["FAULTS", "FaultServer", "Request", "When"]
