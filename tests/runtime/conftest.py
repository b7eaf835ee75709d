"""Makes the helpers in this folder importable from the test folders below it."""

import os

# The oracles' threads would spin beside ours; the products here are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
