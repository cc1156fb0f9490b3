"""Objects of other libraries as first-class nodes; no library is imported before one of its objects
appears.

Modules, Variables, `Rngs`, optimizers, metrics and States of `flax.nnx` are nodes in every function
and every transform, alone or mixed with others. Equinox modules, optax states and other pytrees
are values, as anywhere.
"""

from anabranch.graph import _classify
from anabranch.graph._scope import HOOKS
from anabranch.interop._named_arrays import from_named_arrays, to_named_arrays
from anabranch.interop._nnx_specs import translate
from anabranch.interop._nnx_state import from_nnx_state, to_nnx_state
from anabranch.interop._resolve import FlaxHook, resolve
from anabranch.transforms._specs import add_translation

_classify.add_resolver(resolve)
HOOKS.add(FlaxHook())
add_translation(translate)

__all__ = ["from_named_arrays", "from_nnx_state", "to_named_arrays", "to_nnx_state"]
