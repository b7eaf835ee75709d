"""The one error of this package."""


class KernelError(RuntimeError):
    """The compiled engine cannot be built, loaded or used. The message says what, why and what to do."""
