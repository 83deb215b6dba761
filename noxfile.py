"""The project's tasks: `nox -l` lists them, `nox` alone checks, `nox -s tests -- -k tar` passes arguments on."""

import os

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "imports", "docs", "tests"]


def install(session: nox.Session, *requirements: str, byte_code: bool = True) -> None:
    """Install with the versions that are pinned; `byte_code` is two thirds of the work, and for what is imported."""
    session.install(*([] if byte_code else ["--no-compile"]), "-c", "constraints.txt", *requirements)


@nox.session
def demo(session: nox.Session) -> None:
    """Train from tar shards in an S3 that runs in a thread."""
    install(session, ".[demo]")
    session.run("python", "examples/train_digits.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests against the installed package, side by side; `-- -n0` runs them one after the other."""
    install(session, ".[test,video]")
    session.run("pytest", "-n", "auto", "--maxprocesses", "4", "--dist", "worksteal", *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """Run the fault table and the simulation over 20,000 seeds, or HEADRACE_SEEDS; takes about an hour."""
    install(session, ".[test]")
    seeds = os.environ.get("HEADRACE_SEEDS", "20000")
    paths = ("tests/network/test_fault_table.py", "tests/simulation")
    session.run("pytest", "--timeout=0", *paths, *session.posargs, env={"HEADRACE_SEEDS": seeds})


@nox.session
def resumes(session: nox.Session) -> None:
    """Interrupt and resume epochs at random points: HEADRACE_RESUMES (9,000) by plan alone, a ninth with reads."""
    install(session, ".[test]")
    count = int(os.environ.get("HEADRACE_RESUMES", "9000"))
    options = ("--timeout=0", "-o", "faulthandler_timeout=0", *session.posargs)
    plans = tuple(f"tests/unit/{name}.py" for name in ("test_plan_resumes", "test_lane_packing", "test_mixed_lanes"))
    session.run("pytest", *options, *plans, env={"HEADRACE_RESUMES": str(count)})
    real = ("tests/end_to_end/state", "tests/end_to_end/test_pack_lanes.py", "tests/process/test_resume_after_kill.py")
    env = {"HEADRACE_RESUMES": str(max(1, count // 9)), "HEADRACE_KILLS": "50"}
    session.run("pytest", *options, *real, env=env)


PEERS = [  # the two sets exclude each other, over huggingface-hub
    nox.param(("torchdata", "datasets", "grain", "litdata", "webdataset"), id="most"),
    nox.param(("mosaicml-streaming",), id="mosaic"),
]


@nox.session
@nox.parametrize("libraries", PEERS)
def peers(session: nox.Session, libraries: tuple[str, ...]) -> None:
    """Run the resume test on headrace and on the peers, into one table."""
    install(session, ".[test]", *libraries)
    found = session.cache_dir / "resume.jsonl"
    session.run("python", "tests/peers/run.py", "--json", str(found), *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Look for bytes that break the readers of formats, for HEADRACE_FUZZ_SECONDS (600) in all."""
    install(session, ".[test]", "atheris>=3")
    session.run("python", "tests/fuzz/run.py", *session.posargs)


@nox.session
def frameworks(session: nox.Session) -> None:
    """Run the loader inside training frameworks."""
    peers = ("lightning>=2.6", "accelerate>=1.15", "transformers>=5.20", "torchtitan>=0.3")
    install(session, ".[test]", *peers)
    session.run("pytest", "tests/frameworks", *session.posargs)


@nox.session
def foreign(session: nox.Session) -> None:
    """Read what other libraries write, as they read it."""
    install(
        session,
        ".[test]",
        "litdata",
        "polars",
        "megatron-core",
        "megatron-energon",
        "zstd",
        "pyarrow",
        "tfrecord",
        "datasets",
        "pylance",
        "array-record",
    )
    session.run("pytest", "tests/foreign", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Look for mistakes, and for code that is not formatted."""
    install(session, "ruff>=0.9")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the package, strictly."""
    install(session, ".[image,zarr]", "mypy>=1.15", byte_code=False)
    session.run("mypy", "--strict", "src", *session.posargs)


@nox.session
def imports(session: nox.Session) -> None:
    """Check who imports whom."""
    install(session, "import-linter>=2.3")
    session.run("lint-imports", *session.posargs, env={"PYTHONPATH": "src"})


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; every warning is an error. It is made of the sources, which need not be installed."""
    install(session, *nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]["docs"])
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure; `nox -s bench -- --help` says what there is."""
    install(session, ".[fast]", "-r", "benchmarks/requirements.txt")
    session.run("python", "benchmarks/run.py", *session.posargs)


@nox.session
def torch_suite(session: nox.Session) -> None:
    """Run torch's own tests of its DataLoader on ours: `nox -s torch_suite -- PATH/test_dataloader.py`."""
    install(session, ".[test]", "expecttest", "psutil")
    session.run("python", "tests/torch_suite.py", *session.posargs)
