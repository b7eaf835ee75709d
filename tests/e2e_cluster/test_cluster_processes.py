import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import processes
from e2e.cluster.shell import Failure, exclusive, wait_until, write

STAT = "4242 ({name}) {state} 17 4242 4242 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 {started} 1000 20"


def fake_proc(folder: Path, *, name: str = "sleep", state: str = "S", started: int = 900, boot: str = "boot-1") -> Path:
    write(folder / "4242" / "stat", STAT.format(name=name, state=state, started=started))
    write(folder / processes.BOOT_ID, boot + "\n")
    return folder


def record(folder: Path, *, started: int = 900, boot: str = "boot-1") -> Path:
    file = folder / "node.pid"
    write(file, STAT.format(name="unshare", state="R", started=started) + f"\n{boot}\n")
    return file


@pytest.mark.parametrize("name", ["sleep", "a b", "x) S 1 (y", "(((", ")"])
def test_a_process_is_known_again_whatever_its_name(tmp_path: Path, name: str) -> None:
    found = processes.read(record(tmp_path), fake_proc(tmp_path / "proc", name=name))
    assert found == processes.Process(4242, 900, "boot-1")


@pytest.mark.parametrize(
    "proc",
    [
        {"started": 901},  # the number was given to another process
        {"boot": "boot-2"},  # the machine was started again since
        {"state": "Z"},  # ended, not yet reaped
    ],
)
def test_a_stale_pid_file_is_nobody(tmp_path: Path, proc: dict[str, object]) -> None:
    assert processes.read(record(tmp_path), fake_proc(tmp_path / "proc", **proc)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["", "4242", "\n\n", "nonsense\nboot-1\n", STAT[:20] + "\nboot-1"])
def test_a_damaged_or_missing_pid_file_is_nobody(tmp_path: Path, content: str) -> None:
    proc = fake_proc(tmp_path / "proc")
    write(tmp_path / "node.pid", content)
    assert processes.read(tmp_path / "node.pid", proc) is None
    assert processes.read(tmp_path / "missing.pid", proc) is None


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "sleep.pid"
    processes.start(file, ["sleep", "60"], tmp_path / "log")
    yield file
    processes.stop(file)


def test_start_and_stop(sleeper: Path) -> None:
    process = processes.read(sleeper)
    assert process is not None
    assert os.readlink(f"/proc/{process.pid}/exe").endswith(("sleep", "coreutils", "busybox"))
    assert os.getsid(process.pid) == process.pid
    assert processes.stop(sleeper)
    assert not process.alive()
    assert not sleeper.exists()
    assert not processes.stop(sleeper)


def test_stop_never_kills_a_stranger_with_the_same_number(sleeper: Path, tmp_path: Path) -> None:
    process = processes.read(sleeper)
    assert process is not None
    stale = tmp_path / "stale.pid"
    fields = Path(f"/proc/{process.pid}/stat").read_text().split(" ")
    fields[21] = str(int(fields[21]) - 1)
    write(stale, " ".join(fields).strip() + "\n" + process.boot + "\n")
    assert not processes.stop(stale)
    assert process.alive()


def test_a_killed_process_is_gone_for_the_next_run(sleeper: Path) -> None:
    process = processes.read(sleeper)
    assert process is not None
    process.kill(signal.SIGKILL)
    wait_until("its end", lambda: processes.read(sleeper) is None, 10)


def test_a_program_that_cannot_start_shows_why(tmp_path: Path) -> None:
    (tmp_path / "x.pid.new").mkdir()  # the record cannot be written, so the program is never run
    with pytest.raises(Failure, match=r"sleep ended at once; its last words, in .*log:\n.*x\.pid\.new"):
        processes.start(tmp_path / "x.pid", ["sleep", "60"], tmp_path / "log")


def test_lock_excludes_and_ends_with_its_holder(tmp_path: Path) -> None:
    waited: list[str] = []
    child = os.fork()
    if child == 0:  # holds the lock and dies without letting go
        try:
            with exclusive(tmp_path / "lock"):
                write(tmp_path / "held", "")
                signal.pause()
        finally:
            os._exit(1)
    wait_until("the lock to be held", (tmp_path / "held").exists, 10)

    def kill_holder() -> None:
        waited.append("waited")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    with exclusive(tmp_path / "lock", kill_holder):
        pass
    assert waited == ["waited"]


def test_wait_until_says_what_it_waited_for() -> None:
    with pytest.raises(Failure, match="gave up after 0 s of waiting for: the node\nsee the log"):
        wait_until("the node", lambda: False, 0, hint="see the log")
