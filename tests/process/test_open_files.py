"""Few file descriptors: loaders work with few, or raise an error that names the number they need."""

from pathlib import Path

import pytest
from process.waiting import output_of, run_script

LIMITED = """
    import resource, warnings
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
    COUNT = 96

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return COUNT
        def __getitem__(self, index):
            return torch.full((2000,), index)

    def numbers(loader):
        return [int(sample[0]) for batch in loader for sample in batch]
"""
SERVED = """
    import functools, http.server
    class Quiet(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        def log_message(self, *args):
            pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory={folder!r}))
    port, ready = server.server_address[1], os.fork()
    if ready == 0:
        server.serve_forever()
        os._exit(0)
    server.server_close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [128, 256])
@pytest.mark.parametrize("options", ["", ", economic=True"])
def test_torchs_way_with_16_workers_delivers_all_when_few_files_may_be_open(limit: int, options: str) -> None:
    code = (
        LIMITED.format(limit=limit)
        + f"""
    loader = hr.DataLoader(Numbers(), batch_size=4, num_workers=16, prefetch_factor=4{options})
    print(numbers(loader) == list(range(96)))
    """
    )
    assert output_of(code, timeout_s=90) == "True\n"


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "workers"), [(64, 2), (128, 8), (256, 8)])
def test_stream_over_http_delivers_all_when_few_files_may_be_open(limit: int, workers: int, tmp_path: Path) -> None:
    for number in range(96):
        (tmp_path / f"{number:03d}.bin").write_bytes(bytes([number]) * 100)
    code = (
        SERVED.format(folder=str(tmp_path))
        + LIMITED.format(limit=limit)
        + f"""
    urls = [f"http://127.0.0.1:{{port}}/{{number:03d}}.bin" for number in range(96)]
    try:
        with hr.DataLoader(hr.files(urls).map(lambda s: s["bin"][0]), batch_size=4, num_workers={workers}) as loader:
            print(loader.options["fetch"].concurrency <= {limit} // 2)
            print([int(x) for batch in loader for x in batch] == list(range(96)))
    finally:
        os.kill(ready, signal.SIGKILL)
    """
    )
    assert output_of(code, timeout_s=90) == "True\nTrue\n"


@pytest.mark.slow
@pytest.mark.parametrize("data", ["Numbers()", "hr.from_map(Numbers())"])
def test_loader_says_what_it_needs_when_there_are_too_few_files_for_its_workers(data: str) -> None:
    out = output_of(
        LIMITED.format(limit=64)
        + f"""
    try:
        list(hr.DataLoader({data}, batch_size=4, num_workers=64))
    except hr.OptionError as error:
        print(error)
    """
    )
    assert "num_workers=64 needs some 2" in out
    assert "of the 64 that it may have: raise the limit (`ulimit -n" in out


@pytest.mark.slow
def test_warning_says_that_fewer_reads_are_made_when_more_were_asked_for() -> None:
    code, out, err = run_script(
        LIMITED.format(limit=128)
        + """
    loader = hr.DataLoader(hr.from_map(Numbers()), batch_size=4, num_workers=2, fetch=hr.Fetch(concurrency=500))
    print(loader.options["fetch"].concurrency)
    loader.close()
    """
    )
    assert code == 0, err
    assert 4 <= int(out) < 64
    assert "RuntimeWarning: hr.Fetch(concurrency=500): no more than" in err
    assert "ulimit -n" in err
