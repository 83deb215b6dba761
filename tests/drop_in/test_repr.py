"""A loader tells in one line what it is."""

from __future__ import annotations

import torch

import headrace as hr


class Wordy(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def __repr__(self) -> str:
        return "many\nlines"


class Async(hr.AsyncDataset):
    def __len__(self) -> int:
        return 4

    async def aget(self, index: int) -> int:
        return index


class Own(hr.DataLoader[int]):
    pass


def test_loader_of_a_torch_data_set_tells_its_type_and_options() -> None:
    loader = hr.DataLoader(Wordy(), batch_size=2, num_workers=1)
    assert repr(loader) == "DataLoader(Wordy(…), batch_size=2, num_workers=1, regime='torch')"
    assert repr(Own(Wordy())) == "Own(Wordy(…), batch_size=1, num_workers=0, regime='torch')"


def test_loader_of_an_asynchronous_data_set_tells_its_type() -> None:
    assert repr(hr.DataLoader(Async())) == "DataLoader(Async(…), batch_size=1, num_workers=0, regime='headrace')"
    assert repr(hr.DataLoader(Async().map(len))).startswith("DataLoader(Async(…).map(len), ")


def test_loader_in_economic_mode_says_so() -> None:
    loader = hr.DataLoader(Wordy(), batch_size=2, num_workers=2, economic=True)
    assert repr(loader) == "DataLoader(Wordy(…), batch_size=2, num_workers=2, regime='economic')"


def test_loader_of_a_stream_tells_the_stream_without_secrets() -> None:
    data = hr.stream("https://me:secret@host/a-{0..3}.tar?sig=secret", format="tar").decode("l8").to_tuple("png")
    told = repr(hr.DataLoader(data, batch_size=8))
    assert told.startswith("DataLoader(stream(https://host/a-0.tar?sig=*** and 3 more).decode(")
    assert told.endswith("batch_size=8, num_workers=0, regime='headrace')")
    assert "\n" not in told


def test_loader_of_a_long_chain_is_told_in_a_line_and_one_that_is_not_made_is_no_error() -> None:
    data = hr.stream("a.tar")
    for _ in range(200):
        data = data.map(len)
    assert len(repr(hr.DataLoader(data))) < 300
    assert repr(hr.DataLoader.__new__(hr.DataLoader)).startswith("DataLoader(")
