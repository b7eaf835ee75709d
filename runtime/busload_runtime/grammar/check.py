"""The checker process: `python -m busload_runtime.grammar.check`, started by the HTTP process for the first grammar.

Grammars come on stdin, verdicts go to stdout, in frames. An empty verdict means that the grammar is fine. Compiling is
arbitrary work on what a client wrote, in native code that nothing can stop: so each grammar gets `CPU_SECONDS` and the
process `EXTRA_BYTES`, and one that wants more ends the process.
"""

import contextlib
import resource
import signal
import sys
from pathlib import Path
from typing import BinaryIO

from busload_runtime.grammar.errors import GrammarError
from busload_runtime.grammar.frames import frame, length_of
from busload_runtime.grammar.limits import CPU_SECONDS, EXTRA_BYTES
from busload_runtime.grammar.matcher import Vocabulary

_WALK = 32


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # may reach the whole process group
        signal.signal(number, signal.SIG_IGN)
    # Single bytes: what a grammar costs does not hang on the model, and a mask shows that a text can begin.
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)] + [b""], {256})
    with contextlib.suppress(ValueError, OSError):
        limit = _data_bytes() + EXTRA_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    while (text := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process
        verdict = _verdict(vocabulary, text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(frame(verdict.encode()))
        sys.stdout.buffer.flush()


def _verdict(vocabulary: Vocabulary, text: str) -> str:
    """What is wrong with a grammar. Walks along one of its texts, since some costs show behind the first token only."""
    try:
        matcher = vocabulary.compile(text)
        for _ in range(_WALK):
            first = int.from_bytes(matcher.mask(), "little")
            if matcher.advance((first & -first).bit_length() - 1):
                break
    except GrammarError as error:
        return str(error)
    return ""


def _read(stream: BinaryIO) -> str | None:
    """The content of the next frame; None at the end of the stream."""
    head = stream.read(len(frame(b"")))
    return stream.read(length_of(head)).decode() if head else None


def _data_bytes() -> int:
    """Private memory of this process, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/self/status has no VmData")


if __name__ == "__main__":
    main()
