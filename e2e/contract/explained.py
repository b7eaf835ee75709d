"""Checks of the public suites that fail here, and why that is right or cannot be otherwise."""

EXPLAINED: dict[tuple[str, str], str] = {
    ("llm-comply", "Image Input"): (
        "The bundled model reads text only. An image part is refused with 400 and named in `param`: an answer that "
        "ignored the picture would be a wrong one."
    ),
    ("llm-comply", "Error Handling"): (
        "It sends a chat without `model` and wants an error. A server of one model takes that as its own, as vLLM "
        "does; a name that is another model's is 404."
    ),
    ("llm-comply", "Tool Calling"): (
        "The chat template of the bundled model knows no tools. `tools` is refused with 400 rather than ignored."
    ),
    ("compatcanary", "Forced tool call"): (
        "The chat template of the bundled model knows no tools. `tools` is refused with 400 rather than ignored."
    ),
}
