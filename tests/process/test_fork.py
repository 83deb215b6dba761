"""A process that is forked while a loader runs: the child gets an error, and the parent continues."""

from __future__ import annotations

import pytest
from process.waiting import run_script

CHILD = """
def in_child(act):
    '''What `act` did in a forked child, as text.'''
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            try:
                answer = str(act())
            except BaseException as error:
                answer = f"{type(error).__name__} {error}"
            os.write(writing, answer.encode())
        finally:
            {end}
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return answer, os.waitstatus_to_exitcode(status)

"""


def forking(code: str, *, end: str = "os._exit(0)") -> list[str]:
    import textwrap

    returncode, out, err = run_script(CHILD.replace("{end}", end) + textwrap.dedent(code))
    assert (returncode, err) == (0, "")
    return out.splitlines()


@pytest.mark.slow
def test_child_gets_an_error_and_the_parent_goes_on_exactly() -> None:
    lines = forking("""
        loader = hr.DataLoader(Numbers(400).map(lambda x: x), batch_size=4, num_workers=2)
        it = iter(loader)
        got = []
        for number, batch in enumerate(it):
            got += batch.tolist()
            if number in (0, 3, 50):
                print(in_child(lambda: next(it)))
                print(in_child(lambda: next(iter(loader))))
                print(in_child(lambda: it.close()))
                print(in_child(lambda: loader.close()))
                print(in_child(lambda: exec("del it, loader", globals())))
        print(got == list(range(400)))
        print([x for b in loader for x in b.tolist()] == list(range(400)))
        loader.close()
        print(threading.active_count())
    """)
    for line in (lines[k] for number in range(3) for k in (5 * number, 5 * number + 1)):
        assert line.startswith("('LoaderClosedError") and "forked" in line, line
        assert line.endswith(", 0)")
    for line in (lines[k] for number in range(3) for k in range(5 * number + 2, 5 * number + 5)):
        assert line == "('None', 0)"
    assert lines[15:] == ["True", "True", "1"]


@pytest.mark.slow
def test_child_that_exits_as_interpreters_do_leaves_the_parent_alone() -> None:
    lines = forking(
        """
        loader = hr.DataLoader(Numbers(400).map(lambda x: x), batch_size=4, num_workers=2)
        unused = hr.DataLoader(Numbers(8), batch_size=4, num_workers=2)
        it = iter(loader)
        got = next(it).tolist()
        print(in_child(lambda: unused.close()))
        print(in_child(lambda: "bye"))
        got += [x for b in it for x in b.tolist()]
        print(got == list(range(400)), [b.tolist() for b in unused])
        """,
        end="sys.exit(5)",
    )
    assert lines == ["('None', 5)", "('bye', 5)", "True [[0, 1, 2, 3], [4, 5, 6, 7]]"]


@pytest.mark.slow
def test_child_can_make_a_loader_of_its_own() -> None:
    lines = forking("""
        def own():
            with hr.DataLoader(Numbers(8).map(lambda x: -x), batch_size=4, num_workers=2) as another:
                return [b.tolist() for b in another]

        loader = hr.DataLoader(Numbers(400), batch_size=4, num_workers=2)
        it = iter(loader)
        got = next(it).tolist()
        print(in_child(own))
        got += [x for b in it for x in b.tolist()]
        print(got == list(range(400)))
    """)
    assert lines == ["('[[0, -1, -2, -3], [-4, -5, -6, -7]]', 0)", "True"]


@pytest.mark.slow
def test_batch_that_a_child_holds_is_not_written_over_by_the_parent() -> None:
    lines = forking("""
        def large(x):
            return np.full(50_000, x, np.float32)

        loader = hr.DataLoader(Numbers(200).map(large), batch_size=4, num_workers=2)
        it = iter(loader)
        batch = next(it)
        go_reading, go_writing = os.pipe()
        is_forked_reading, is_forked_writing = os.pipe()

        def look():
            os.close(go_writing)
            os.write(is_forked_writing, b"x")
            os.read(go_reading, 1)
            return [int(x) for x in batch[:, 0]], bool((batch == batch[:, :1]).all())

        answers = []
        thread = threading.Thread(target=lambda: answers.append(in_child(look)))
        thread.start()
        os.read(is_forked_reading, 1)
        del batch
        for other in it:
            del other
        os.write(go_writing, b"x")
        thread.join()
        print(answers[0])
    """)
    assert lines == ["('([0, 1, 2, 3], True)', 0)"]
