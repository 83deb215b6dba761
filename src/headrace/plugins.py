"""Extension points: own stores, formats, decoders, operators and executors.

The contract tests of `headrace.testing` check them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._util import lazy_names

if TYPE_CHECKING:
    from headrace._util.sample_ranges import Rows as Rows
    from headrace.fetch.stores.addresses import register_store as register_store
    from headrace.formats.decoders import register_decoder as register_decoder
    from headrace.formats.format import Block as Block
    from headrace.formats.format import Catalogue as Catalogue
    from headrace.formats.format import Format as Format
    from headrace.formats.format import ShardEntry as ShardEntry
    from headrace.formats.registry import register_format as register_format
    from headrace.ops.registry import BatchOp as BatchOp
    from headrace.ops.registry import OrderOp as OrderOp
    from headrace.ops.registry import SampleOp as SampleOp
    from headrace.ops.registry import register_operator as register_operator
    from headrace.types import Answer as Answer
    from headrace.types import Batcher as Batcher
    from headrace.types import Store as Store
    from headrace.workers.executor import Executor as Executor
    from headrace.workers.executor import Loss as Loss
    from headrace.workers.executor import Worker as Worker

_NAMES = {
    "headrace._util.sample_ranges": "Rows",
    "headrace.fetch.stores.addresses": "register_store",
    "headrace.formats.decoders": "register_decoder",
    "headrace.formats.format": "Block Catalogue Format ShardEntry",
    "headrace.formats.registry": "register_format",
    "headrace.ops.registry": "BatchOp OrderOp SampleOp register_operator",
    "headrace.types": "Answer Batcher Store",
    "headrace.workers.executor": "Executor Loss Worker",
}
__all__, __getattr__ = lazy_names(__name__, _NAMES)
__dir__ = __all__.copy
