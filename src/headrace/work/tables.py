"""Samples of a task as tables of columns, after decoding and between stages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from headrace.failures import failures_among
from headrace.sent import MemberBytes, SentPart
from headrace.tasks import Chain, Finish
from headrace.torch_compat.sample_table import RowsOfTables, SampleTable
from headrace.work.inputs import Inputs
from headrace.work.messages import TaskMessage

Busy = dict[str, float]


def takes_tables(chain: Chain) -> bool:
    """True if the chain collates samples directly from tables."""
    return getattr(chain.collate, "takes_tables", False)


def columns_of(chain: Chain, part: SentPart, inputs: Inputs, busy: Busy) -> tuple[Any, MemberBytes, int] | None:
    """Apply all steps to a part's columns: (result, bytes, count). None: not possible."""
    assert chain.columns is not None
    found = part.undecoded(inputs)
    if found is None:
        return None
    rows, bodies, urls = found
    began = time.perf_counter()
    columns = chain.columns(rows, bodies, urls)
    name = chain.steps[0].name
    busy[name] = busy.get(name, 0.0) + time.perf_counter() - began
    return None if columns is None else (columns, bodies, len(rows))


def decoded(chain: Chain, order: TaskMessage, inputs: Inputs, busy: Busy) -> RowsOfTables | None:
    """Return the samples of a task as rows of tables. None: they are made one by one."""
    is_of_use = takes_tables(chain) if order.finish is Finish.BATCH else chain.measure is not None
    if chain.columns is None or order.one_by_one or not is_of_use:
        return None
    tables = []
    for part in order.parts:
        found = columns_of(chain, part, inputs, busy)
        table = None if found is None else SampleTable.of_columns(*found)
        if table is None:
            return None
        tables.append((table, range(table.count)))
    return RowsOfTables(tables)


def table_of(samples: Sequence[object], made_of: RowsOfTables | None, inputs: Inputs) -> SampleTable | None:
    """Return a table of samples, perhaps from `made_of`. None: each is pickled separately."""
    if not inputs.shares_memory or failures_among(samples):  # without shared memory a table would be sent for each use
        return None
    table = None if made_of is None else made_of.only
    # The measure function may have changed a sample's dict.
    return table if table is not None and isinstance(table.names, int) else SampleTable.of(samples)
