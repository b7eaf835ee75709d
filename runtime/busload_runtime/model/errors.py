"""The one error of this package."""


class ModelError(ValueError):
    """A model that cannot be used. The message is one line: file, field, value, what is allowed, what to do."""
