"""The one error of this package."""


class ExecutorError(RuntimeError):
    """An executor that cannot be made or cannot go on. The message is one line: what, value, allowed, what to do."""
