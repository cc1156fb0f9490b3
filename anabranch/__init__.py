"""Impure, object-oriented code under every JAX transform."""

from anabranch import contextvars_ext, debug, errors, graph, interop, transforms
from anabranch.contextvars_ext import *  # noqa: F403 - each package lists its public names itself
from anabranch.graph import *  # noqa: F403 - same
from anabranch.transforms import *  # noqa: F403 - same

__version__ = "0.1.0"

__all__ = ["contextvars_ext", "debug", "errors", "graph", "interop", "transforms"]
__all__ += contextvars_ext.__all__
__all__ += graph.__all__
__all__ += transforms.__all__
