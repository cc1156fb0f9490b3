"""Jit-aware context variables, values plumbed through transforms, values taken out of traces."""

from __future__ import annotations

from anabranch.contextvars_ext import random
from anabranch.contextvars_ext._hoist import hoist, hoist_concrete, hoisting
from anabranch.contextvars_ext._keystream import KeyStream
from anabranch.contextvars_ext._keystream_var import (
    get_next_key,
    plumb_rng_key_and_jit,
    set_default_seed,
    set_keystream_on_enter,
)
from anabranch.contextvars_ext._node_id import NodeId
from anabranch.contextvars_ext._plumb import plumb_and_transform
from anabranch.contextvars_ext._set_on_enter import SetOnEnter
from anabranch.contextvars_ext._stateful import (
    StatefulNode,
    get_state_dict,
    set_state_dict_on_enter,
)
from anabranch.contextvars_ext._var import JitAwareContextVar

# The samplers can be imported from here too; their home, and `__all__`, is the submodule.
from anabranch.contextvars_ext.random import *  # noqa: F403

__all__ = [
    "JitAwareContextVar",
    "SetOnEnter",
    "plumb_and_transform",
    "hoist",
    "hoist_concrete",
    "hoisting",
    "KeyStream",
    "set_keystream_on_enter",
    "get_next_key",
    "set_default_seed",
    "plumb_rng_key_and_jit",
    "StatefulNode",
    "NodeId",
    "set_state_dict_on_enter",
    "get_state_dict",
    "random",
]
