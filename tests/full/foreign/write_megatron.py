"""Has Megatron write token files into a folder, and their documents into `documents.json`."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

KINDS = ("uint8", "uint16", "int32", "int64", "int8")


def main(folder: Path) -> None:
    drawn, written = np.random.default_rng(0), {}
    for multimodal in (False, True):
        for kind in KINDS:
            name = f"{kind}-{'with-modes' if multimodal else 'plain'}"
            documents = [drawn.integers(0, 100, length).tolist() for length in drawn.integers(0, 50, 30)]
            builder = IndexedDatasetBuilder(
                str(folder / f"{name}.bin"), dtype=np.dtype(kind).type, multimodal=multimodal
            )
            for tokens in documents:
                half = len(tokens) // 2  # a document of two sequences
                for some in (tokens[:half], tokens[half:]):
                    builder.add_item(torch.tensor(some), mode=int(multimodal))
                builder.end_document()
            builder.finalize(str(folder / f"{name}.idx"))
            written[name] = documents
    (folder / "documents.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
