"""Eight CPU devices for every test process, and reproducible property tests."""

import os

from hypothesis import HealthCheck, settings

# Read when JAX starts its backend, so this has to run before the first test module is imported.
# Each worker of pytest-xdist is a process of its own and comes by here too.
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# The first example of a shape compiles: no deadline, and a slow example says nothing.
# `explore` looks for new counterexamples: pytest --hypothesis-profile=explore
_slow = [HealthCheck.too_slow]
settings.register_profile(
    "default", derandomize=True, deadline=None, database=None, suppress_health_check=_slow
)
settings.register_profile(
    "explore", deadline=None, max_examples=2_000, print_blob=True, suppress_health_check=_slow
)
settings.load_profile("default")
