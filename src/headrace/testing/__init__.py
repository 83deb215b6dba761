"""For people who write a store, a format or a data set: contract tests to inherit, free of any test runner.

A contract is a class of `test_…` methods. Inherit it in a class whose name your runner collects, and give what it asks
for.
"""

from __future__ import annotations

from headrace.testing.channels import ChannelContract
from headrace.testing.stores import StoreContract

__all__ = ["ChannelContract", "StoreContract"]
