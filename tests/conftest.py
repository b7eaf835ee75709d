"""Makes the helpers in this folder importable from all tests; how far property tests search."""

import os

from hypothesis import HealthCheck, settings

# The same examples in each run, so that a change is judged by what it changes, and no limits of time, so that the
# machine is not judged at all. HYPOTHESIS_PROFILE=search draws other examples each time.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "same")
