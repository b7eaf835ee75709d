"""The memory bandwidth of this machine, measured as a pod measures its own at start: by copying."""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

_BYTES = 2**26


def measure(threads: int, seconds: float = 0.3) -> float:
    """Bytes per second that so many threads read plus write when they copy; the best of the copies made in `seconds`.

    Other work on the machine only ever lowers it.
    """
    part = _BYTES // threads // 2
    buffers = [ctypes.create_string_buffer(b"\1" * (2 * part), 2 * part) for _ in range(threads)]
    addresses = [ctypes.addressof(buffer) for buffer in buffers]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            for copied in [pool.submit(ctypes.memmove, at, at + part, part) for at in addresses]:  # without the GIL
                copied.result()
            best = max(best, 2 * part * threads / (time.perf_counter() - start))
    return best
