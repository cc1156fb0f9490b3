"""Which flax the comparisons are about.

Behaviour is stated for flax 0.12.8 and newer. With an older flax, or none at all, the files would
say nothing about anabranch, so they are not collected. No warning of flax has to be filtered: the
programs use nothing that it deprecates.
"""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version  # pytest brings it along

_OLDEST = Version("0.12.8")


def _flax_is_new_enough() -> bool:
    try:
        return Version(metadata.version("flax")) >= _OLDEST
    except metadata.PackageNotFoundError:
        return False


collect_ignore_glob = [] if _flax_is_new_enough() else ["test_*.py"]
