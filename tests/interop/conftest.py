"""These tests need flax; where it is not installed they are not collected."""

from __future__ import annotations

from importlib import util

collect_ignore_glob = [] if util.find_spec("flax") else ["test_nnx_*.py", "test_real_models.py"]
