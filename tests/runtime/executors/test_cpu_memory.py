"""What stays in memory of a model file once the CPU engine has packed its weights."""

from pathlib import Path

from busload_runtime.executors.create import create_executor
from busload_runtime.model.bundled import resolve_source


def resident(path: Path) -> list[int]:
    """kB of each mapping of the file that are in this process's memory."""
    found, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and first == "Rss:":
            found.append(int(line.split()[1]))
    return found


def test_pages_of_the_file_are_given_back() -> None:
    path = Path(resolve_source("bundled:smollm2-135m-instruct")).resolve()
    executor = create_executor("cpu", str(path))
    assert executor.weight_bytes > 90e6
    assert sum(resident(path)) < 1000
