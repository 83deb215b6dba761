"""Texts 20 ms away to packed sequences of 4,096 tokens: tokens a second, and CPU time of all processes for each.

    headrace      `.tokenize().pack(4096)` in lanes over s3://, by an index; "best_fit" keeps documents whole
    torch         an IterableDataset under torch's DataLoader: boto3, zstandard, a buffer of tokens that is cut
    litdata       the same buffer over LitData's own reader; it reads texts in its own chunks, which were made before,
                  and copies them to this machine
    grain         ConcatThenSplitIterDataset behind a source of torch's kind, which Grain has not, under mp_prefetch
    torchtitan    HuggingFaceTextDataLoader, over `datasets` and http; it gives labels, too, shifted by one
    tokenizer     two processes that tokenize texts that lie in memory, one by one, and drop the tokens: the limit

The texts are lines of JSON in shards of seekable Zstandard, which all but LitData read as they lie; documents are cut
out of the source of Python's library and of its reference, with lengths as they are on the web (lognormal, median 600
tokens). All have one tokenizer, learned of the same text, two workers, and batches of 8 sequences with positions.
All call the cheaper of the tokenizer's functions but torchtitan, whose own class calls `encode`: the limit is measured
with either.

Each runs in a process of its own, all in turns. In a short epoch what was made ahead counts for too much: a rate above
the tokenizer's own tells that it was, and such a row is of no use. The clock starts behind some batches and stops
before the last ones, so that workers' starts are not in it. A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import numpy as np
import s3_peers
import tables
from cpu import cpu_s
from server import Server

LENGTH, BATCH, WORKERS, SHARDS, VOCABULARY = 4096, 8, 2, 8, 16_384
FRAME = 2**18  # bytes of text
BEFORE, PART = 16, 0.85  # batches before the clock starts, and how much of an epoch has come when it stops
BUCKET, CHUNKS, INDEX = "texts", "litdata", "texts.hri"
_KEYS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
Batch = tuple[Any, Any, Any]  # tokens, positions: [sequences, tokens]; and what is filled up, or None


def write(place: Path, megabytes: float) -> None:
    """The shards, their index, LitData's chunks, the tokenizer, and what is known of all of it."""
    import tokenizers
    import zstandard

    library = [path.read_text() for path in sorted(Path(json.__file__).parent.parent.glob("*.py"))]
    sources = [*topics.values(), *library]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<end>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(sources, trainer)
    (place / "tokenizer").mkdir()
    tokenizer.save(str(place / "tokenizer/tokenizer.json"))
    text, random = "\n".join(sources), np.random.default_rng(0)
    lengths = random.lognormal(np.log(600 * 4.1), 1.0, int(megabytes * 1e6 / 4000)).astype(int) + 20
    starts = (random.random(len(lengths)) * (len(text) - lengths.max())).astype(int)
    texts = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    counts = [len(found.ids) for found in tokenizer.encode_batch_fast(texts)]
    (place / BUCKET).mkdir()
    for shard in range(SHARDS):
        lines = [json.dumps({"id": n, "text": texts[n]}) + "\n" for n in range(shard, len(texts), SHARDS)]
        data = "".join(lines).encode()
        pieces = [data[at : at + FRAME] for at in range(0, len(data), FRAME)]
        frames = [zstandard.ZstdCompressor(3).compress(piece) for piece in pieces]
        sizes = np.array([[len(a), len(b)] for a, b in zip(frames, pieces, strict=True)], "<u4").tobytes()
        table = sizes + np.array([len(frames)], "<u4").tobytes() + b"\0" + (0x8F92EAB1).to_bytes(4, "little")
        tail = (0x184D2A5E).to_bytes(4, "little") + len(table).to_bytes(4, "little") + table
        (place / BUCKET / f"{shard:05d}.jsonl.zst").write_bytes(b"".join(frames) + tail)
    shards = [str(path) for path in sorted((place / BUCKET).iterdir())]
    kept = ["--quiet", "--output", str(place / INDEX)]
    subprocess.run([sys.executable, "-m", "headrace.cli", "index", *kept, *shards], check=True)
    if not s3_peers.missing("litdata-own"):
        s3_peers.write_litdata(({"text": one} for one in texts), place / CHUNKS)
    (place / "known.json").write_text(json.dumps({"documents": len(texts), "tokens": sum(counts)}))


def shards_of(place: Path) -> list[str]:
    """The names of the shards."""
    return [f"{BUCKET}/{shard:05d}.jsonl.zst" for shard in range(SHARDS)]


@functools.cache
def tokenizer_of(place: Path) -> Any:
    """The tokenizer; once in each process."""
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(place / "tokenizer/tokenizer.json"))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, by the cheaper one of the tokenizer's calls: the other finds their places in it, too."""
    (found,) = tokenizer.encode_batch_fast([text])
    ids: list[int] = found.ids
    return ids


def headrace(url: str, place: Path, method: Any = "concat") -> Iterator[Batch]:
    import headrace as hr

    endpoint = {"endpoint": url, "allow_http": True, "skip_signature": True, "region": "us-east-1"}
    shards = [f"s3://{name}" for name in shards_of(place)]
    data = hr.stream(shards, index=str(place / INDEX), storage_options=endpoint)
    data = data.tokenize(tokenizer_of(place), field="text", dtype="int32")
    loader: Any = hr.DataLoader(data.pack(LENGTH, method=method), batch_size=BATCH, num_workers=WORKERS)
    with loader:
        for batch in loader:
            yield batch["input_ids"], batch["position_ids"], batch["document_ids"] < 0


def lines(url: str, name: str) -> Iterator[str]:
    """The texts of a shard, read as a stream."""
    import boto3
    import botocore.client
    import orjson
    import zstandard

    config = botocore.client.Config(s3={"addressing_style": "path"}, retries={"max_attempts": 3})
    client = boto3.client("s3", endpoint_url=url, config=config)
    bucket, _, key = name.partition("/")
    body = client.get_object(Bucket=bucket, Key=key)["Body"]
    plain = zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=True)
    for line in io.BufferedReader(plain, 2**20):
        yield orjson.loads(line)["text"]


def concatenated(texts: Iterable[str], place: Path) -> Iterator[dict[str, Any]]:
    """Sequences of a buffer that is cut, with positions in documents and their numbers."""
    import torch

    tokenizer = tokenizer_of(place)
    buffers: list[list[int]] = [[], [], []]
    for number, text in enumerate(texts):
        ids = ids_of(tokenizer, text)
        for buffer, more in zip(buffers, (ids, range(len(ids)), itertools.repeat(number, len(ids))), strict=True):
            buffer.extend(more)
        while len(buffers[0]) >= LENGTH:
            full = [torch.tensor(buffer[:LENGTH], dtype=torch.int32) for buffer in buffers]
            buffers = [buffer[LENGTH:] for buffer in buffers]
            yield {"input_ids": full[0], "position_ids": full[1], "document_ids": full[2] - full[2][0]}


def under_torch(texts: Callable[[int, int], Iterable[str]], place: Path) -> Iterator[Batch]:
    """torch's loader over the sequences of what a worker of so many has."""
    import torch

    class Sequences(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[dict[str, Any]]:
            info = torch.utils.data.get_worker_info()
            assert info
            return concatenated(texts(info.id, info.num_workers), place)

    for batch in torch.utils.data.DataLoader(Sequences(), batch_size=BATCH, num_workers=WORKERS):
        yield batch["input_ids"], batch["position_ids"], None


def torch_iterable(url: str, place: Path) -> Iterator[Batch]:
    def texts(worker: int, workers: int) -> Iterable[str]:
        return itertools.chain.from_iterable(lines(url, name) for name in shards_of(place)[worker::workers])

    return under_torch(texts, place)


def litdata(url: str, place: Path) -> Iterator[Batch]:
    import litdata as ld

    s3_peers._allow_http()
    data = ld.StreamingDataset(
        f"s3://{CHUNKS}/",
        cache_dir=tempfile.mkdtemp(prefix="litdata-", dir=place / "scratch"),
        storage_options={"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1",
                         "endpoint_url": url},
        shuffle=False,
    )  # fmt: skip
    return under_torch(lambda worker, workers: (row["text"] for row in data), place)


def grain(url: str, place: Path) -> Iterator[Batch]:
    import grain as gr
    from grain.experimental import ConcatThenSplitIterDataset, InterleaveIterDataset

    class ShardIterator(gr.DatasetIterator):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            super().__init__()
            self.lines = lines(url, name)

        def __next__(self) -> dict[str, Any]:
            return {"text": next(self.lines)}

        def get_state(self) -> Any:
            return {}

        def set_state(self, state: Any) -> None:
            """Nothing here is resumed."""

    class Shard(gr.IterDataset):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __iter__(self) -> ShardIterator:
            return ShardIterator(self.name)

    def tokenize(sample: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": np.array(ids_of(tokenizer_of(place), sample["text"]), np.int32)}

    shards = gr.MapDataset.source(shards_of(place)).map(Shard)
    data = InterleaveIterDataset(shards, cycle_length=1).map(tokenize)
    data = ConcatThenSplitIterDataset(data, length_struct={"input_ids": LENGTH}).batch(BATCH)
    for batch in data.mp_prefetch(gr.MultiprocessingOptions(num_workers=WORKERS)):
        yield batch["input_ids"], batch["input_ids_positions"], batch["input_ids_segment_ids"] == 0


def torchtitan(url: str, place: Path) -> Iterator[Batch]:
    from datasets import load_dataset
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

    urls = [f"{url}/{name}" for name in shards_of(place)]
    DATASETS["texts"] = DatasetConfig(
        path="json",
        loader=lambda path: load_dataset(path, data_files=urls, split="train", streaming=True),
        sample_processor=lambda sample: sample["text"],
    )
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(place / "tokenizer"))
    config = HuggingFaceTextDataLoader.Config(dataset="texts", infinite=False, num_workers=WORKERS)
    loader = HuggingFaceTextDataLoader(
        config, dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=LENGTH, local_batch_size=BATCH
    )
    for batch, _ in loader:
        yield batch["input"], batch["positions"], None


PEERS: dict[str, tuple[str, Callable[[str, Path], Iterator[Batch]]]] = {
    "headrace": ("headrace", headrace),
    "headrace, best_fit": ("headrace", functools.partial(headrace, method="best_fit")),
    "torch": ("torch", torch_iterable),
    "litdata": ("litdata", litdata),
    "grain": ("grain", grain),
    "torchtitan": ("torchtitan", torchtitan),
}
LIMITS = {"tokenizer": "encode_batch_fast", "tokenizer, encode": "encode"}


def measured(batches: Iterator[Batch], tokens: int, mean: float) -> dict[str, float]:
    """Tokens a second, CPU seconds for a million, the share that is filled up, and cuts a document."""
    wanted = int(tokens / (LENGTH * BATCH) * PART) * LENGTH * BATCH
    for _ in range(BEFORE):
        next(batches)
    began, cpu, count, padding, pieces = time.perf_counter(), cpu_s(), 0, 0, 0
    for ids, positions, is_filled in batches:
        assert ids.shape == (BATCH, LENGTH)
        begins = np.asarray(positions) == 0
        begins[:, 0] = True
        if is_filled is not None:
            filled = np.asarray(is_filled)
            padding += int(filled.sum())
            begins &= ~filled
        pieces += int(begins.sum())
        count += ids.shape[0] * ids.shape[1]
        if count >= wanted - BEFORE * LENGTH * BATCH:
            break
    wall, spent, kept = time.perf_counter() - began, cpu_s() - cpu, count - padding
    return {
        "rate": kept / wall, "cost": spent / kept * 1e6, "padding": padding / count, "cuts": pieces * mean / kept - 1
    }  # fmt: skip


def _tokenize(place: Path, call: str, mine: int, ready: Any, done: Any) -> None:
    import orjson
    import zstandard

    tokenizer, texts = tokenizer_of(place), []
    for name in shards_of(place)[mine::WORKERS]:
        with (place / name).open("rb") as file:
            plain = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
        texts += [orjson.loads(line)["text"] for line in plain.splitlines()]
    encode: Callable[[str], list[int]] = functools.partial(ids_of, tokenizer)
    if call == "encode":
        encode = lambda text: tokenizer.encode(text).ids
    ready.wait()
    began, wall, count = time.process_time(), time.perf_counter(), 0
    for text in texts:
        count += len(encode(text))
    done.put((count, time.process_time() - began, time.perf_counter() - wall))


def limit(place: Path, call: str) -> dict[str, float]:
    """What the tokenizer alone takes, in as many processes as there are workers."""
    ready: Any = multiprocessing.Barrier(WORKERS)
    done: Any = multiprocessing.Queue()
    workers = [multiprocessing.Process(target=_tokenize, args=(place, call, k, ready, done)) for k in range(WORKERS)]
    for worker in workers:
        worker.start()
    counts, cpu, wall = zip(*(done.get() for _ in workers), strict=True)
    for worker in workers:
        worker.join()
    return {"rate": sum(counts) / max(wall), "cost": sum(cpu) / sum(counts) * 1e6}


def one(name: str, url: str, place: Path) -> dict[str, float]:
    """One run."""
    if name in LIMITS:
        return limit(place, LIMITS[name])
    known = json.loads((place / "known.json").read_text())
    lost = known["documents"] if name == "torchtitan" else 0  # the last token of each is a label alone
    tokens = known["tokens"] - lost
    return measured(PEERS[name][1](url, place), tokens, tokens / known["documents"])


def main() -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=24, help="of text")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=300, help="how long a run may take")
    parser.add_argument("--delay", default="d20", help="before each answer, as server.lua has it")
    parser.add_argument("--only", nargs="+", choices=[*PEERS, *LIMITS], default=[*PEERS, *LIMITS])
    parser.add_argument("--json", type=Path, help="keep every run as a line of this file")
    parser.add_argument("--report", type=Path, help="make the table from such a file, and measure nothing")
    for name in ("one", "url", "place"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one, given.url, Path(given.place))), flush=True)
        os._exit(0)  # some peers take long to end, or hang
    results = tables.read(given.report) if given.report else _rounds(given)
    rows = []
    best = {of: [row[of] for row in results if row["name"] == "tokenizer"] for of in ("rate", "cost")}
    for name in [*PEERS, *LIMITS]:
        own = [row for row in results if row["name"] == name]
        if not own:
            continue
        share = median(best["cost"]) / median(row["cost"] for row in own) if best["cost"] else 0.0
        cells = [name, tables.spread([row["rate"] / 1000 for row in own]), tables.spread([r["cost"] for r in own], 2)]
        cells.append(f"{share:.2f}")
        if "cuts" in own[0]:
            cells += [f"{median(row['padding'] for row in own):.2%}", f"{median(row['cuts'] for row in own):.2f}"]
        rows.append(cells)
    head = ["", "thousand tokens/s", "CPU s a million tokens", "of the tokenizer's", "padding", "cuts a document"]
    print(tables.markdown(head, rows))


def _rounds(given: argparse.Namespace) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    names = []
    for name in given.only:
        if name in LIMITS or importlib.util.find_spec(PEERS[name][0]):
            names.append(name)
        else:
            print(f"{name}: left out, {PEERS[name][0]} is not installed", flush=True)
    with tempfile.TemporaryDirectory(prefix="packed-") as folder, Server(Path(folder)) as server:
        place = Path(folder)
        place.chmod(0o755)
        (place / "scratch").mkdir()
        write(place, given.megabytes)
        for _ in range(given.runs):
            for name in names:
                url = f"{server.url}/{given.delay}"
                told = [sys.executable, __file__, "--one", name, "--url", url, "--place", folder]
                environment = {**os.environ, **_KEYS, "TOKENIZERS_PARALLELISM": "false"}
                try:
                    out = subprocess.run(
                        told, stdout=subprocess.PIPE, text=True, check=True, timeout=given.limit_s, env=environment
                    )
                except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                    print(f"{name}: no result in this round: {str(error)[-200:]}", flush=True)
                    continue
                row = {"name": name} | json.loads(out.stdout.splitlines()[-1])
                results.append(row)
                tables.append(given.json, row)
                numbers = [f"{key} {value:.5g}" for key, value in row.items() if key != "name"]
                print(f"{name}: {', '.join(numbers)}", flush=True)
    return results


if __name__ == "__main__":
    main()
