"""The scrape stays small whatever clients send, and the server starts and answers on hosts that give it little."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, eventually, running

CPU_CGROUPS = Path("/sys/fs/cgroup/cpu")


def test_names_from_clients_make_no_series(server: LiveServer) -> None:
    """Model names, paths, users and request ids, a thousand of each, seen by every route that could count them."""
    before = set(server.metrics())
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for place in range(1000):
            name = f"model-{place}"
            headers = {"x-request-id": name, "user-agent": name}
            match place % 4:
                case 0:
                    assert http.post("/v1/completions", json={"model": name, "prompt": "x"}).status_code == 404
                case 1:
                    body = {"model": name, "messages": [{"role": "user", "content": "x"}], "user": name}
                    assert http.post("/v1/chat/completions", json=body, headers=headers).status_code == 404
                case 2:
                    assert http.get(f"/v1/models/{name}", headers=headers).status_code == 404
                case 3:
                    assert http.get(f"/{name}", headers=headers).status_code == 404
    scrape = server.http.get("/metrics").content
    print(f"{len(before)} series in {len(scrape)} bytes")
    assert set(server.metrics()) == before
    assert len(scrape) < 200_000


@pytest.fixture
def memory_hog(tmp_path: Path) -> Iterator[None]:
    """A neighbour that takes 500 MB and gives them back, over and over, and leaves the CPUs alone in between."""
    code = (
        "import time\nwhile True: block = bytearray(500_000_000); block[::4096] = b'x' * len(block[::4096]); "
        "time.sleep(0.1); del block; time.sleep(0.1)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    yield
    process.kill()
    process.wait()


@pytest.mark.usefixtures("memory_hog")
def test_it_starts_beside_a_neighbour_whose_memory_comes_and_goes(tmp_path: Path) -> None:
    """Nothing at the start compares the machine's memory before and after."""
    for _ in range(2):
        with running(tmp_path) as server:
            assert server.complete(prompt="hello", max_tokens=4).status_code == 200


def threads(server: LiveServer) -> int:
    """Of the engine process."""
    return len(list(Path(f"/proc/{server.engine_pid()}/task").iterdir()))


def answers(server: LiveServer) -> str:
    """A short greedy text; the probes must answer meanwhile."""
    fields = {"prompt": "hello", "max_tokens": 40, "temperature": 0, "n": 4}
    response = server.complete(**fields)
    assert response.status_code == 200
    assert server.http.get("/health/live", timeout=5).status_code == 200
    text: str = response.json()["choices"][0]["text"]
    return text


def test_threads_follow_the_cpus_that_are_given(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One CPU, one thread, far more threads than CPUs: it starts, computes the same, and has as many as it was told."""
    given = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(given)})
    try:
        with running(tmp_path, f"--model={tiny}") as server:
            expected = answers(server)
            assert threads(server) == 1
    finally:
        os.sched_setaffinity(0, given)
    counts = []
    for told in (1, 16):
        monkeypatch.setenv("BUSLOAD_THREADS", str(told))
        with running(tmp_path, f"--model={tiny}") as server:
            assert answers(server) == expected
            counts.append(threads(server))
    assert counts[1] - counts[0] == 15


@pytest.fixture
def cgroup(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A CPU cgroup of our own, with the quota in CPUs that is the parameter."""
    group = CPU_CGROUPS / f"busload-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text(str(int(request.param * 100_000)))
    except OSError as error:
        pytest.skip(f"no CPU cgroup (v1) can be made here: {error}")
    yield group
    eventually(lambda: _removed(group))  # the engine ends a moment after its server


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def threads_of_one(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Of an engine that was told to compute with one."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("BUSLOAD_THREADS", "1")
        with running(tmp_path_factory.mktemp("one"), f"--model={tiny}") as server:
            return threads(server)


@pytest.mark.parametrize("cgroup", [0.5, 1.5], indirect=True)
def test_it_serves_under_a_quota(tiny: Path, tmp_path: Path, threads_of_one: int, cgroup: Path) -> None:
    """Of half a CPU and of one and a half: one thread computes, for two would only wait for each other."""
    own = Path("/proc/self/cgroup").read_text()
    home = next(line.split(":", 2)[2] for line in own.splitlines() if "cpu" in line.split(":")[1].split(","))
    (cgroup / "tasks").write_text(str(os.getpid()))
    try:
        with running(tmp_path, f"--model={tiny}") as server:
            assert threads(server) == threads_of_one
            answers(server)
    finally:
        (CPU_CGROUPS / home.lstrip("/") / "tasks").write_text(str(os.getpid()))
