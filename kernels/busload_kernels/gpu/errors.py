"""The one error of this package."""


class GpuKernelError(ValueError):
    """What a kernel was asked to do cannot be done. The message names the argument, its value and what is allowed."""
