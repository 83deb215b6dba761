"""The project's tasks: `nox -l` lists them, `nox` alone checks, `nox -s tests -- -k tar` passes arguments on."""

import json
import os
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "imports", "docs", "tests", "full"]

LINT = ["ruff>=0.9"]
TYPES = [".[image,zarr]", "mypy>=1.15"]
IMPORTS = ["import-linter>=2.3"]
DOCS = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]["docs"]
TESTS = [".[test,video]"]
FUZZ = [".[test]", "atheris>=3"]
TORCH_SUITE = [".[test]", "expecttest", "psutil"]
FRAMEWORKS = [".[test]", "lightning>=2.6", "accelerate>=1.15", "transformers>=5.20", "torchtitan>=0.3"]
FOREIGN = [
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
]
PEERS = {  # the two sets exclude each other, over huggingface-hub
    "most": [".[parquet]", "torchdata", "datasets", "grain", "litdata", "webdataset"],
    "mosaic": [".[parquet]", "mosaicml-streaming"],
}
BENCH = [".[fast]", "-r", "benchmarks/requirements.txt"]

# Tests wait for processes and servers: three of them keep two cores busy.
SIDE_BY_SIDE = ("-n", str(min(4, 3 * (os.cpu_count() or 1) // 2)), "--dist", "worksteal", "--durations", "30")

LOCKS = {  # requirements/NAME.txt pins what these install; `nox -s lock` writes it
    "nox": ["nox"],
    "tests": [*TESTS, *FUZZ, *TORCH_SUITE],
    "checks": [*LINT, *TYPES, *IMPORTS],
    "docs": DOCS,
    "frameworks": FRAMEWORKS,
    "foreign": FOREIGN,
    "peers-most": PEERS["most"],
    "peers-mosaic": PEERS["mosaic"],
    "bench": BENCH,
}


def install(session: nox.Session, lock: str, *requirements: str, byte_code: bool = True) -> None:
    """Install the versions that requirements/`lock`.txt pins.

    Compiling byte code takes two thirds of the time. A session that imports little can do without.
    """
    options = [] if byte_code else ["--no-compile"]
    session.install(*options, "-c", f"requirements/{lock}.txt", *requirements)


def run_pytest(session: nox.Session, *arguments: str, **env: str) -> None:
    """Run pytest in the environment that unit, tests and full share, against the installed package."""
    programs = Path(".nox/environment/bin").resolve()
    env["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    session.run(str(programs / "python"), "-m", "pytest", *SIDE_BY_SIDE, *arguments, env=env, external=True)


@nox.session(default=False)
def environment(session: nox.Session) -> None:
    """Install what the sessions unit, tests and full share."""
    install(session, "tests", *TESTS)


@nox.session(venv_backend="none", requires=["environment"])
def unit(session: nox.Session) -> None:
    """Run the tests that need no process and no socket: under two minutes."""
    run_pytest(session, "tests/unit", "-m", "not slow and not process", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"])
def tests(session: nox.Session) -> None:
    """Test every promise once: under five minutes on two cores. `-- -n0` runs the tests one after the other."""
    run_pytest(session, "-m", "not slow", *session.posargs)


@nox.session(venv_backend="none", requires=["environment"])
def full(session: nox.Session) -> None:
    """Run the large and slow tests. Hypothesis draws new examples in each run, except in CI."""
    run_pytest(session, "-m", "slow", *session.posargs, HEADRACE_EXPLORE="1")


@nox.session
def newest(session: nox.Session) -> None:
    """Run the default tests with the newest release of every dependency."""
    session.install("--upgrade", "--upgrade-strategy", "eager", *TESTS)
    session.run("pytest", *SIDE_BY_SIDE, "-m", "not slow", *session.posargs)


@nox.session(venv_backend="none")
def lock(session: nox.Session) -> None:
    """Write the lock files, or those named: `nox -s lock -- tests docs`. It keeps what requirements/fixed.txt says."""
    for name in session.posargs or LOCKS:
        report = Path(session.create_tmp()) / f"{name}.json"
        options = (
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--report",
            str(report),
            "-c",
            "requirements/fixed.txt",
        )
        session.run("python3", "-m", "pip", "install", *options, *LOCKS[name], external=True)
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
        pins = {one["name"].lower(): f"{one['name']}=={one['version'].partition('+')[0]}" for one in found}
        pins.pop("headrace", None)
        first = f"# Written by `nox -s lock -- {name}`, with Python 3.11 on Linux.\n"
        Path(f"requirements/{name}.txt").write_text(first + "".join(f"{pins[key]}\n" for key in sorted(pins)))


@nox.session
def demo(session: nox.Session) -> None:
    """Train from tar shards in an S3 that runs in a thread."""
    install(session, "tests", ".[demo]")
    session.run("python", "examples/train_digits.py", *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """Run the fault table and the simulation over 20,000 seeds, or HEADRACE_SEEDS; takes about an hour."""
    install(session, "tests", ".[test]")
    seeds = os.environ.get("HEADRACE_SEEDS", "20000")
    paths = ("tests/network/test_fault_table.py", "tests/simulation")
    session.run("pytest", "--timeout=0", *paths, *session.posargs, env={"HEADRACE_SEEDS": seeds})


@nox.session
def resumes(session: nox.Session) -> None:
    """Interrupt and resume epochs at random points: HEADRACE_RESUMES (9,000) in packed rows, a ninth with reads."""
    install(session, "tests", ".[test]")
    count = int(os.environ.get("HEADRACE_RESUMES", "9000"))
    options = ("--timeout=0", *session.posargs)
    session.run("pytest", *options, "tests/unit/test_packed_rows.py", env={"HEADRACE_RESUMES": str(count)})
    real = ("tests/end_to_end/state", "tests/end_to_end/test_pack_lanes.py", "tests/process/test_resume_after_kill.py")
    env = {"HEADRACE_RESUMES": str(max(1, count // 9)), "HEADRACE_KILLS": "50"}
    session.run("pytest", *options, *real, env=env)


@nox.session
@nox.parametrize("group", list(PEERS))
def peers(session: nox.Session, group: str) -> None:
    """Run the resume test on headrace and on the peers, into one table."""
    install(session, f"peers-{group}", *PEERS[group])
    found = session.cache_dir / "resume.jsonl"
    session.run("python", "benchmarks/resume_test/run.py", "--json", str(found), *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Look for bytes that break the readers of formats, for HEADRACE_FUZZ_SECONDS (600) in all."""
    install(session, "tests", *FUZZ)
    session.run("python", "tests/full/fuzz/run.py", *session.posargs)


@nox.session
def frameworks(session: nox.Session) -> None:
    """Run the loader inside training frameworks."""
    install(session, "frameworks", *FRAMEWORKS)
    session.run("pytest", "tests/full/frameworks", *session.posargs)


@nox.session
def foreign(session: nox.Session) -> None:
    """Read what other libraries write, as they read it."""
    install(session, "foreign", *FOREIGN)
    session.run("pytest", "tests/full/foreign", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Look for mistakes, and for code that is not formatted."""
    install(session, "checks", *LINT)
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the package, strictly."""
    install(session, "checks", *TYPES, byte_code=False)
    session.run("mypy", "--strict", "src", *session.posargs)


@nox.session
def imports(session: nox.Session) -> None:
    """Check who imports whom."""
    install(session, "checks", *IMPORTS)
    session.run("lint-imports", *session.posargs, env={"PYTHONPATH": "src"})


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; every warning is an error. It is made of the sources, which need not be installed."""
    install(session, "docs", *DOCS)
    session.run("mkdocs", "build", "--strict", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure; `nox -s bench -- --help` says what there is."""
    install(session, "bench", *BENCH)
    session.run("python", "benchmarks/run.py", *session.posargs)


@nox.session
def torch_suite(session: nox.Session) -> None:
    """Run torch's own tests of its DataLoader on ours: `nox -s torch_suite -- PATH/test_dataloader.py`."""
    install(session, "tests", *TORCH_SUITE)
    session.run("python", "tests/torch_suite.py", *session.posargs)
