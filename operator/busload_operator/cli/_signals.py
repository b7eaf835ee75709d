"""Signals that come before a long-running command can handle them."""

import os
import signal


def end_quietly_until_handled() -> None:
    """SIGTERM ends the process with 0, SIGUSR1 does nothing, until the command installs handlers of its own.

    Its imports take a second, and nothing runs yet that would have to be drained. But for process 1 of a container a
    signal without a handler is lost: the pod would start, serve or lead, and be killed when its grace time is over.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
