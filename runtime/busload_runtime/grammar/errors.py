"""What is wrong with a grammar, without the library that found it."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled or followed any further: one line, for the client."""
