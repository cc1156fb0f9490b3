"""Messages name what the caller wrote: the transform, the option or the path, and the remedy."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import anabranch as ab
from anabranch.errors import AnabranchError, ArgumentError, FilterError, StructureError


class Layer(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.ones(3))
        self.n = ab.Variable(jnp.array(0))

    def set(self, x: Any) -> None:
        self.w.value = x

    def __call__(self, x: Any) -> None:
        self.w.value = x


HIDDEN = types.SimpleNamespace(layer=Layer(), rngs=ab.Rngs(0))
CAPTURED, NAMED = Layer(), {"a": [Layer()]}
RNGS = ab.Rngs(dropout=0)
X = jnp.ones((4, 3))
LANES = jnp.arange(4.0)[:, None] * jnp.ones(3)


def f(m: Layer, x: Any) -> Any:
    return m.w * x


def mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:2]), ("i",))


def draw_hidden(x: Any) -> Any:
    return x + jax.random.normal(HIDDEN.rngs())


def draw_captured(x: Any) -> Any:
    return x + jax.random.normal(RNGS.dropout())


def write_hidden(x: Any) -> None:
    HIDDEN.layer.w.value = x


def write_captured(x: Any) -> None:
    CAPTURED.w.value = x


def write_named(x: Any) -> None:
    NAMED["a"][0].w.value = x


def longer_hidden(c: Any, x: Any) -> Any:
    HIDDEN.layer.w.value = jnp.ones(5)
    return c, x


def longer_captured(c: Any, x: Any) -> Any:
    CAPTURED.w.value = jnp.ones(5)
    return c, x


def nothing(*args: Any) -> None:
    pass


Case = tuple[Callable[[], Any], str]

PATHS: dict[str, Case] = {
    "vmap hidden": (lambda: ab.vmap(write_hidden)(LANES), r"^  HIDDEN\.layer\.w$"),
    "vmap captured": (lambda: ab.vmap(write_captured)(LANES), r"^  CAPTURED\.w$"),
    "vmap container": (lambda: ab.vmap(write_named)(LANES), r"^  NAMED\['a'\]\[0\]\.w$"),
    "vmap method": (lambda: ab.vmap(Layer().set)(LANES), r"^  self\.w$"),
    "vmap drawn hidden": (lambda: ab.vmap(draw_hidden)(X), r"^HIDDEN\.rngs\.default\.count: "),
    "vmap split hidden": (
        lambda: ab.vmap(draw_hidden, rngs="split")(X),
        r"^HIDDEN\.rngs\.default\.count: .* Pass the stream as an argument",
    ),
    "vmap drawn captured": (lambda: ab.vmap(draw_captured)(X), r"^RNGS\.dropout\.count: "),
    "pmap hidden": (lambda: ab.pmap(write_hidden)(LANES[:2]), r"^  HIDDEN\.layer\.w$"),
    "shard_map captured": (
        lambda: ab.shard_map(
            lambda x: write_captured(x[0]), mesh=mesh(), in_specs=P("i"), out_specs=P()
        )(LANES),
        r"^  CAPTURED\.w$",
    ),
    "scan hidden": (lambda: ab.scan(longer_hidden)(0.0, X), r"^  HIDDEN\.layer\.w is float32\[3\]"),
    "scan captured": (lambda: ab.scan(longer_captured)(0.0, X), r"^  CAPTURED\.w is float32\[3\]"),
    "fori_loop hidden": (
        lambda: ab.fori_loop(0, 3, lambda i, c: longer_hidden(c, i)[0], 0.0),
        r"^  HIDDEN\.layer\.w is float32\[3\]",
    ),
    "while_loop captured": (
        lambda: ab.while_loop(lambda c: c < 3, lambda c: longer_captured(c + 1, c)[0], 0),
        r"^  CAPTURED\.w is float32\[3\]",
    ),
    "cond hidden": (
        lambda: ab.cond(True, longer_hidden, lambda c, x: (c, x), 0.0, X),
        r"^  HIDDEN\.layer\.w: float32\[5\] after true_fun",
    ),
    "cond captured": (
        lambda: ab.cond(True, longer_captured, lambda c, x: (c, x), 0.0, X),
        r"^  CAPTURED\.w: float32\[5\] after true_fun",
    ),
    "switch static": (
        lambda: ab.switch(0, [lambda: setattr(CAPTURED, "a", 1), nothing]),
        r"^  CAPTURED: has also \.a after branches\[0\]",
    ),
    "map captured": (lambda: ab.map(write_captured, X), r"^  CAPTURED\.w$"),
    "map hidden": (lambda: ab.map(write_hidden, X), r"^  HIDDEN\.layer\.w$"),
    "associative_scan hidden": (
        lambda: ab.associative_scan(lambda a, b: (write_hidden(a), a)[1], X),
        r"^  HIDDEN\.layer\.w$",
    ),
    "custom_vjp": (lambda: _backward()(X), r"residuals\[0\]\.w"),
}


def _backward() -> Any:
    rule: Any = ab.custom_vjp(lambda x: x.sum())

    def bwd(m: Layer, ct: Any) -> Any:
        m.w.value = ct
        return (None,)

    rule.defvjp(lambda x: (x.sum(), Layer()), bwd)
    return ab.grad(rule)


OPTIONS: dict[str, Case] = {
    "jit static_argnums": (lambda: ab.jit(f, static_argnums="m"), "jit: static_argnums is an int"),
    "jit static_argnames": (lambda: ab.jit(f, static_argnames=3), "jit: static_argnames is a str"),
    "jit donate_argnums": (lambda: ab.jit(f, donate_argnums="m"), "jit: donate_argnums is an int"),
    "jit compiler_options": (lambda: ab.jit(f, compiler_options=3), "compiler_options is a dict"),
    "jit inline": (lambda: ab.jit(f, inline="yes"), "jit: inline is True or False; found 'yes'"),
    "vmap axis_name": (lambda: ab.vmap(f, axis_name=[1]), "vmap: axis_name is a name"),
    "pmap axis_name": (lambda: ab.pmap(f, axis_name=3.0), "pmap: axis_name is a string"),
    "pmap devices": (lambda: ab.pmap(f, devices="cpu"), "pmap: devices is a list of devices"),
    "shard_map mesh": (lambda: ab.shard_map(f, mesh=3, out_specs=P()), "mesh is a jax.sharding"),
    "grad has_aux": (lambda: ab.grad(f, has_aux=X), "grad: has_aux is True or False"),
    "remat policy": (lambda: ab.remat(f, policy="dots"), "remat: policy is a function"),
    "scan unroll": (lambda: ab.scan(f, unroll=0), "scan: unroll is a positive integer"),
    "scan reverse": (lambda: ab.scan(f, reverse="yes"), "scan: reverse is True or False"),
    "fori_loop unroll": (
        lambda: ab.fori_loop(0, 3, nothing, 0.0, unroll="a"),
        "fori_loop: unroll is a positive integer",
    ),
    "checkify errors": (lambda: ab.checkify(f, errors=3), "checkify: errors is a set of errors"),
    "split_rngs": (lambda: ab.split_rngs(RNGS, splits=-1), "splits is a positive integer"),
    "custom_vjp": (lambda: ab.custom_vjp(f).defvjp(3, f), "defvjp: fwd is of type int"),
    "custom_jvp": (lambda: ab.custom_jvp(f).defjvp(3), "defjvp: jvp is of type int"),
    "merge": (lambda: ab.merge(3, 4), "merge takes a graphdef and then states"),
    "merge swapped": (
        lambda: ab.merge(*reversed(ab.split(Layer()))),
        r"not a State\b.* first",
    ),
    "update": (lambda: ab.update(Layer(), 3), r"not a int; `state\(obj\)`"),
    "update object": (lambda: ab.update(Layer(), Layer()), r"not a Layer; `state\(obj\)`"),
    "map_leaves": (lambda: ab.map_leaves(3, Layer()), "map_leaves takes a function"),
    "recursive_map": (lambda: ab.recursive_map(3, Layer()), "recursive_map takes a function"),
    "register_node": (lambda: ab.register_node(3), "a class is registered"),
    "update_context": (lambda: ab.update_context([]).__enter__(), "a tag is anything that"),
    "hoist": (lambda: ab.hoist(3), "hoist: fn is of type int"),
}

SPECS: dict[str, Case] = {
    "vmap axis": (
        lambda: ab.vmap(f, in_axes=(None, 5))(Layer(), X),
        r"args\[1\]: axis 5 is out of range for an array of rank 2, .* from -2 to 1",
    ),
    "vmap scalar": (lambda: ab.vmap(lambda m: m.n)(Layer()), r"rank 0, which has no axis; None is"),
    "vmap entries": (
        lambda: ab.vmap(f, in_axes=(0,))(Layer(), X),
        "args: the specification has 1 entries .* give one for each",
    ),
    "jit in_shardings": (
        lambda: ab.jit(f, in_shardings=("i", None))(Layer(), X),
        r"args\[0\]\.w: a sharding is a jax.sharding.Sharding.* not 'i'",
    ),
    "jit out_shardings": (lambda: ab.jit(f, out_shardings=3)(Layer(), X), "a sharding is a .* 3;"),
    "jit uneven": (
        lambda: ab.jit(f, in_shardings=(NamedSharding(mesh(), P("i")), None))(Layer(), X),
        r"args\[0\]\.w: .*partitioned 2 times",
    ),
    "jit uneven result": (
        lambda: ab.jit(f, out_shardings=NamedSharding(mesh(), P(None, "i")))(Layer(), X),
        "the return value: .*partitioned 2 times",
    ),
    "shard_map names": (
        lambda: ab.shard_map(f, mesh=mesh(), in_specs=P(), out_specs=P("z"))(Layer(), X),
        r"names \['z'\], but the axes of the mesh are \['i'\]",
    ),
    "fori_loop bounds": (
        lambda: ab.fori_loop(jnp.int8(0), jnp.int32(3), lambda i, c: c, 0.0),
        "lower is int8, but upper is int32; give both the same dtype",
    ),
    "grad of an integer": (
        lambda: ab.grad(lambda m: m.n * 1)(Layer()),
        "the function returned int32; convert it",
    ),
    "filter": (lambda: ab.state(Layer(), 3), "expected a filter, found 3"),
    "filter of a class": (lambda: ab.OfType(3), "OfType takes a class, not 3"),
    "filter function": (
        lambda: ab.state(Layer(), lambda path: True),
        "called with two arguments, a path and a Variable, but .* takes 1",
    ),
}


@pytest.mark.parametrize("name", PATHS)
def test_paths_are_written_as_the_function_writes_them(name):
    call, text = PATHS[name]
    with pytest.raises(AnabranchError, match=f"(?m){text}") as caught:
        call()
    _check_is_readable(caught.value)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_a_wrong_type_is_told_when_it_is_given(name):
    call, text = OPTIONS[name]
    with pytest.raises(ArgumentError, match=text) as caught:
        call()
    _check_is_readable(caught.value)


@pytest.mark.parametrize("name", SPECS)
def test_what_does_not_fit_is_told_with_its_place_and_a_remedy(name):
    call, text = SPECS[name]
    with pytest.raises((StructureError, FilterError), match=text) as caught:
        call()
    _check_is_readable(caught.value)


def _check_is_readable(error: BaseException) -> None:
    """Check that a message has none of the names that only we know."""
    text = str(error)
    for word in ("found_by_use", "the function.", "function[", "function.", "leaves_", "pytree"):
        assert word not in text
    assert len(text) < 4000


def test_right_options_are_taken():
    ab.jit(f, static_argnums=(), static_argnames=("x",), donate_argnums=[0], inline=True)
    ab.jit(f, static_argnums=np.int64(1), donate_argnames="m", keep_unused=np.bool_(False))
    named = ab.jit(lambda x, name: x * len(name), static_argnames=(n for n in ["name"]))
    assert float(named(1.0, name="four")) == 4.0
    ab.pmap(f, devices=jax.devices(), axis_name="i", backend=None)
    ab.remat(f, policy=jax.checkpoint_policies.everything_saveable)
    ab.scan(lambda c, x: (c, x), unroll=True)(0.0, X)
    ab.fori_loop(0, 3, lambda i, c: c, 0.0, unroll=2)
    ab.vmap(f, axis_name=("i", 1))
    assert ab.split_rngs(RNGS, splits=(2, 3)) is not None


def test_a_variable_that_is_out_of_reach_has_no_name():
    @functools.cache
    def held() -> Any:
        return ab.Param(jnp.ones(3))

    def write(x: Any) -> None:
        held().value = x

    held()
    with pytest.raises(AnabranchError, match="a Variable that the function does not name"):
        ab.vmap(write)(LANES)
