"""What one request's grammar may cost before its first token."""

MAX_SCHEMA_BYTES = 2**16
"""Of a schema as compact JSON."""
MAX_GRAMMAR_BYTES = 2**18
"""Of all that one request asks for."""
CPU_SECONDS = 0.5
"""To compile it, of the checker process."""
EXTRA_BYTES = 40 * 2**20
"""Memory of the checker process beyond what it has at start. Both fit what a pod keeps for growth."""
