"""Jit-aware context variables, and values plumbed into and out of JAX transforms with them."""

from __future__ import annotations

from anabranch.contextvars_ext._var import JitAwareContextVar as JitAwareContextVar

__all__ = ["JitAwareContextVar"]
