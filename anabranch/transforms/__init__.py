"""Graph-aware versions of JAX's transforms."""

from anabranch.transforms._grad import grad, value_and_grad
from anabranch.transforms._jit import JitFunction, jit
from anabranch.transforms._pmap import pmap
from anabranch.transforms._specs import DiffState, StateAxes, StateSharding
from anabranch.transforms._vmap import vmap

__all__ = [
    "DiffState",
    "JitFunction",
    "StateAxes",
    "StateSharding",
    "grad",
    "jit",
    "pmap",
    "value_and_grad",
    "vmap",
]
