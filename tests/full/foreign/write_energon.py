"""Has Megatron-Energon prepare the shards of the folder that is named."""

import sys
from pathlib import Path

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.metadata import WebdatasetMeta
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

RATIO = [("train", 3), ("val", 1), ("test", 1)]


def main(folder: Path) -> None:
    names = sorted(path.name for path in folder.glob("*.tar"))
    WebdatasetPreparator.prepare_dataset(folder, names, split_parts_ratio=RATIO, workers=1)
    for split, _ in RATIO:
        shards = WebdatasetMeta.from_config(EPath(folder), split_part=split).shards
        (folder / f"{split}.txt").write_text("".join(f"{shard.name}\n" for shard in shards))


if __name__ == "__main__":  # it starts processes, which import this
    main(Path(sys.argv[1]))
