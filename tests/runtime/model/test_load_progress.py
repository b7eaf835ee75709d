"""Lines while weights are loaded: none when it is fast, few when it is slow."""

from busload_runtime.model.progress import LoadProgress


def lines_of(seconds_per_part: float, parts: int = 100) -> list[str]:
    now, lines = [50.0], []
    progress = LoadProgress("m.gguf", parts * 10**6, lambda: now[0], lines.append)
    for _ in range(parts):
        now[0] += seconds_per_part
        progress.add(10**6)
    progress.finish()
    return lines


def test_silent_when_fast() -> None:
    assert lines_of(0.015) == []


def test_a_line_every_two_seconds() -> None:
    lines = lines_of(0.125)  # 12.5 seconds
    assert lines == [
        "loading m.gguf: 16% of 100 MB, about 10 s left",
        "loading m.gguf: 32% of 100 MB, about 8 s left",
        "loading m.gguf: 48% of 100 MB, about 6 s left",
        "loading m.gguf: 64% of 100 MB, about 4 s left",
        "loading m.gguf: 80% of 100 MB, about 2 s left",
        "loading m.gguf: 96% of 100 MB, about 0 s left",
        "loading m.gguf: 100 MB in 12.5 s",
    ]


def test_slow_parts() -> None:
    assert len(lines_of(60, parts=3)) == 3
