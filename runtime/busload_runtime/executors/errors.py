"""The one error of this package."""


class ExecutorError(RuntimeError):
    """An executor that cannot be made or cannot go on. The message is one line: what, value, allowed, what to do."""


def wrong_plan(num_blocks: int) -> str:
    """What every executor says to a plan that breaks the promises of `engine.plan`."""
    return (
        "the plan has a chunk without tokens or with too short a block table, or names a token or a KV block that does "
        f"not exist (blocks: {num_blocks})"
    )
