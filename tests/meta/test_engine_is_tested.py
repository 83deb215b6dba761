"""Each class of the engine is tested without a loader."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src" / "headrace"
ENGINE = ("engine/scheduler/*.py", "readers/*.py", "workers/queue.py", "workers/chains.py")
ENUMERATIONS = {"BatchState", "EngineState"}
END_TO_END = {"Quarantine", "Resumable"}  # they write files, and run data sets of users
MADE = {  # what each of these makes is tested through it
    "Epoch": {
        *("Assembly", "BatchWork", "FoundGroup", "GroupLevel", "Level", "Outcome", "Pile"),
        *("RowLevel", "SharedPart", "TogetherLevel", "Units"),
    },
    "IndexedShardProducer": {"Checker", "MemberReads", "PackedFailureError"},
    "ReadingAhead": {"Reading"},
    "ShardProducer": {"ShardRanges"},
    "TaskQueue": {"Chains", "OpenBlocks", "Opening", "PackedChains", "QueueEntry", "QueueWorker"},
}


def classes() -> Iterator[str]:
    paths = (path for pattern in ENGINE for path in sorted(SOURCES.glob(pattern)))
    nodes = (node for path in paths for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
    for node in nodes:
        is_protocol = any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
        if not is_protocol and not node.name.startswith("_"):
            yield node.name


def built(folder: str) -> set[str]:
    nodes = (node for path in (TESTS / folder).glob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def test_each_class_of_the_engine_is_built_in_unit_tests() -> None:
    there, used = set(classes()), built("unit") | built("simulation") | ENUMERATIONS | END_TO_END
    made = set().union(*(names for maker, names in MADE.items() if maker in used))
    assert not there - used - made
    assert made <= there, "these are no more"
