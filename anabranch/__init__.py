"""Impure, object-oriented code under every JAX transform."""

from anabranch import contextvars_ext, errors, graph, transforms
from anabranch.contextvars_ext import *  # noqa: F403
from anabranch.graph import *  # noqa: F403
from anabranch.transforms import *  # noqa: F403

__version__ = "0.1.0"
