"""Which files need which flax.

The programs are written for flax 0.12.8 and newer, whose names they use; what has to hold for every
release is in `test_any_flax.py`.
"""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version  # pytest brings it along


def _flax() -> Version | None:
    try:
        return Version(metadata.version("flax"))
    except metadata.PackageNotFoundError:
        return None


_FOUND = _flax()
collect_ignore_glob = [] if _FOUND else ["test_any_flax.py"]
if _FOUND is None or Version("0.12.8") > _FOUND:
    collect_ignore_glob += ["test_nnx_*.py", "test_real_models.py"]
