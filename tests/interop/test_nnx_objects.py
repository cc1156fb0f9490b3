"""Objects of flax nnx under our transforms: the plain call, exactly (R1 to R4)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import anabranch as ab
from anabranch.errors import AnabranchError, CapturedWriteError, NodeTypeError
from tests.interop.pictures import World, same


class Box(nnx.Module):
    """A module whose attributes are its keyword arguments."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


class Own(ab.Module):
    """The same, one of ours."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


def param(x: float = 1.0, **metadata: Any) -> nnx.Param[Any]:
    return nnx.Param(jnp.array(x), **metadata)


def boxes() -> World:
    shared = param(3.0)
    a, b = Box(v=param(1.0), s=shared), Box(v=param(2.0), s=shared)
    return {"m": Box(a=a, b=b, n=0), "a": a, "shared": shared}


# What a program does, to the world of `boxes`.


def write_values(m: Any, a: Any, shared: Any) -> Any:
    m.a.v[...] += 1
    a.v[...] *= 2
    shared.set_value(shared[...] - m.b.v[...])
    return m.b.s[...]


def swap(m: Any, a: Any, shared: Any) -> Any:
    m.a, m.b = m.b, m.a
    m.a.v[...] += 1
    return a


def swap_variables(m: Any, a: Any, shared: Any) -> Any:
    m.a.v, m.b.s = m.b.s, m.a.v
    return m


def add_and_delete(m: Any, a: Any, shared: Any) -> Any:
    if hasattr(m, "new"):
        del m.new
    else:
        m.new = param(7.0)
        m.again = m.new
    m.label = "changed"
    return None


def replace_a_variable(m: Any, a: Any, shared: Any) -> Any:
    old = m.a.v
    m.a.v = param(5.0)
    return old, m.a.v


def count_statically(m: Any, a: Any, shared: Any) -> Any:
    m.n += 1
    return m.n


def refer_to_itself(m: Any, a: Any, shared: Any) -> Any:
    m.me = m
    a.owner = m
    return a.owner.me.a


def detach(m: Any, a: Any, shared: Any) -> Any:
    if hasattr(m, "a"):
        del m.a
    a.v[...] += 10
    return None


def new_object_twice(m: Any, a: Any, shared: Any) -> Any:
    x = Box(v=param(1.0), s=shared)
    return {"x": x, "y": [x, x.v]}


def set_metadata(m: Any, a: Any, shared: Any) -> Any:
    shared.set_metadata(unit="m")
    a.v.set_metadata("count", a.v.get_metadata("count", 0) + 1)
    return shared.get_metadata("unit")


def array_attribute(m: Any, a: Any, shared: Any) -> Any:
    m.x = nnx.data(getattr(m, "x", jnp.zeros(())) + 1)
    return m.x


PROGRAMS = [
    write_values,
    swap,
    swap_variables,
    add_and_delete,
    replace_a_variable,
    count_statically,
    refer_to_itself,
    detach,
    new_object_twice,
    set_metadata,
    array_attribute,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("transform", [ab.jit, ab.remat], ids=["jit", "remat"])
def test_what_a_function_does_to_modules_is_what_the_plain_call_does(program, transform):
    same(boxes, program, transform)


def test_two_objects_built_alike_share_a_trace():
    traces = []

    @ab.jit
    def f(**world):
        traces.append(1)
        return write_values(**world)

    for _ in range(3):
        f(**boxes())
    assert len(traces) == 1


@pytest.mark.parametrize("change", ["metadata", "static", "attribute", "alias"])
def test_a_change_of_structure_is_seen_at_the_next_call(change):
    traces = []

    @ab.jit
    def f(m):
        traces.append(1)
        return m.a.v[...] + len(m.a.v.get_metadata()) + m.n + len(vars(m)) + (m.a.v is m.b.v)

    def program(m):
        return m.a.v[...] + len(m.a.v.get_metadata()) + m.n + len(vars(m)) + (m.a.v is m.b.v)

    m = boxes()["m"]
    assert f(m) == program(m)
    assert f(m) == program(m)
    assert len(traces) == 1
    if change == "metadata":
        m.a.v.set_metadata(unit="m")
    elif change == "static":
        m.n = 5
    elif change == "attribute":
        m.other = param(1.0)
    else:
        m.b.v = m.a.v
    assert f(m) == program(m)
    assert len(traces) == 2


def test_metadata_one_and_true_are_two_traces():
    traces = []

    @ab.jit
    def f(v):
        traces.append(1)
        return v[...] * 2 if v.get_metadata("flag") is True else v[...]

    assert f(param(flag=1)) == 1
    assert f(param(flag=True)) == 2
    assert len(traces) == 2


def test_lists_and_dicts_of_nnx_keep_identity_and_order():
    def build() -> World:
        items = nnx.List([param(1.0), Box(v=param(2.0))])
        return {"items": items, "d": nnx.Dict(z=param(3.0), b=items[0])}

    def program(items, d):
        items.append(param(float(len(items))))
        d["new"] = items[1]
        d["z"][...] += items[2][...]
        items[0], items[1] = items[1], items[0]
        return d["b"]

    same(build, program, ab.jit)


def test_the_paths_of_a_list_have_integers():
    state = ab.state(nnx.List([param(), Box(v=param())]))
    assert state.paths == ((0,), (1, "v"))


def test_modules_of_both_libraries_dataclasses_and_pytrees_mix():
    def build() -> World:
        shared = param(1.0)
        theirs = Box(v=shared, own=nnx.data(Own(p=ab.Param(jnp.array(2.0)), theirs=shared)))
        return {"ours": Own(theirs=theirs, v=shared), "tree": {"t": (theirs, [shared])}}

    def program(ours, tree):
        theirs = tree["t"][0]
        theirs.own.p.value = theirs.own.p.value + ours.v[...]
        tree["t"][1][0][...] += 1
        tree["t"][1].append(theirs.own)
        ours.late = nnx.List([theirs.own.p.value])
        return theirs.own.theirs

    same(build, program, ab.jit)


def test_optimizers_metrics_and_rngs_are_nodes():
    def build() -> World:
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        return {
            "model": model,
            "optimizer": nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param),
            "metric": nnx.metrics.Average(),
            "rngs": nnx.Rngs(0, dropout=1),
        }

    def program(model, optimizer, metric, rngs):
        x = jax.random.normal(rngs.dropout(), (4, 2))

        def loss_fn(model):
            return ((model(x) - 1) ** 2).mean()

        loss, grads = ab.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        metric.update(values=loss)
        return loss, rngs["params"]()

    same(build, program, ab.jit, calls=3)


def test_an_nnx_state_is_a_node():
    def build() -> World:
        model = boxes()["m"]
        graphdef, state = nnx.split(model)
        return {"model": model, "graphdef": graphdef, "state": state}

    def program(model, graphdef, state):
        state["a"]["v"][...] += 1
        state["late"] = param(9.0)
        return nnx.merge(graphdef, nnx.state(model)).a.v[...], state["a"]["v"]

    same(build, program, ab.jit)


def test_what_is_only_read_is_not_touched():
    model = boxes()["m"]
    before = model.a.v.get_raw_value(), vars(model)["_pytree__state"]
    ab.jit(lambda m: m.a.v[...] * 2)(model)
    assert model.a.v.get_raw_value() is before[0]
    assert vars(model)["_pytree__state"] is before[1]


def test_a_function_that_raises_leaves_everything_as_it_was():
    model = boxes()["m"]
    values = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))

    @ab.jit
    def f(m):
        m.a.v[...] += 1
        m.new = param()
        m.a.v.set_metadata(unit="m")
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        f(model)
    assert not hasattr(model, "new")
    assert not model.a.v.has_metadata("unit")
    after = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))
    assert all(x is y for x, y in zip(values, after, strict=True))
    model.a.v[...] += 1  # still the caller's


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad, jax.checkpoint])
def test_a_write_from_a_plain_jax_transform_raises_the_error_of_flax(transform):
    m = Box(v=param())

    def f(x):
        m.v[...] += 1
        return x.sum()

    x = jnp.ones(2)
    with pytest.raises(nnx.errors.TraceContextError if hasattr(nnx, "errors") else Exception):
        transform(f)(x)
    assert m.v[...] == 1


def test_objects_made_inside_belong_to_the_caller_afterwards():
    m = ab.jit(lambda: Box(v=param(), inner=Box()))()
    m.v[...] += 1
    m.inner.x = "set"
    assert m.v[...] == 2


def test_an_object_kept_from_a_trace_says_so():
    kept = []

    @ab.jit
    def keep(m):
        kept.append(m)

    keep(Box(v=param()))
    with pytest.raises(AnabranchError, match="kept"):
        ab.split(kept[0])
    with pytest.raises(AnabranchError, match="kept"):
        kept[0].v


def test_a_variable_in_the_wrong_trace_is_not_written_by_us():
    v = param()

    def f(x):
        with pytest.raises(CapturedWriteError, match="another trace"):
            ab.update([v], {0: x})
        return x

    jax.jit(f)(jnp.array(1.0))
    assert v[...] == 1


def test_a_node_of_nnx_is_no_key_and_no_element_of_a_set():
    m = Box(v=param())
    for wrong in ({m}, {m: 1}, frozenset([m])):
        with pytest.raises(AnabranchError):
            ab.split([wrong])


def test_a_hijax_variable_is_refused_by_name():
    v = nnx.Param(jnp.ones(2), hijax=True)
    with pytest.raises(NodeTypeError, match="hijax=False"):
        ab.jit(lambda v: v[...])(v)


def test_constructors_and_methods_can_be_transformed():
    class Counter(nnx.Module):
        @ab.jit
        def __init__(self, start):
            self.n = nnx.Variable(start * 2)

        @ab.jit
        def step(self, by):
            self.n[...] += by
            return self

    c = Counter(jnp.array(1))
    assert c.n[...] == 2
    assert c.step(3) is c
    assert c.n[...] == 5
    assert ab.jit(c.step)(by=1) is c
    assert c.n[...] == 6


def test_a_module_can_be_the_function():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    x = jnp.ones((4, 2))
    np.testing.assert_allclose(ab.jit(model)(x), model(x), rtol=1e-6)
    np.testing.assert_allclose(ab.vmap(model)(x), model(x), rtol=1e-6)


class TestGraphFunctions:
    def test_split_and_merge_keep_aliases_and_make_new_objects(self):
        m = boxes()["m"]
        graphdef, state = ab.split(m)
        again = ab.merge(graphdef, state)
        assert type(again) is Box
        assert again is not m
        assert again.a.s is again.b.s
        assert again.a.s is not m.a.s
        assert ab.graph.equal(m, again)
        again.a.v[...] += 1  # a whole object of flax
        again.fresh = param()
        assert m.a.v[...] == 1

    def test_filters_of_both_libraries_select(self):
        net = nnx.Sequential(
            nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5)
        )
        ours = ab.state(net, ab.Param)
        assert ours == ab.state(net, nnx.Param)
        assert len(ours.leaves) == 4
        assert {path[-1] for path in ab.state(net, ab.BatchStat).paths} == {"mean", "var"}
        assert ab.state(net, ab.Variable) == ab.state(net)
        assert len(ab.state(Box(v=ab.Param(1.0)), nnx.Param).leaves) == 0

    def test_streams_are_selected_by_tag(self):
        rngs = nnx.Rngs(0, dropout=1)
        assert {p[0] for p in ab.state(rngs, "dropout").paths} == {"dropout"}
        assert len(ab.state(rngs, nnx.RngKey).leaves) == len(ab.state(rngs, ab.RngKey).leaves) == 2

    def test_update_pop_clone_and_iteration(self):
        m = boxes()["m"]
        ab.update(m, ab.state(m).map(lambda path, x: x + 1))
        assert m.a.v[...] == 2
        copy = ab.clone(m)
        assert copy.a.s is copy.b.s
        m.seen = nnx.Intermediate(jnp.array(4.0))
        assert ab.pop(m, nnx.Intermediate).flat() == {("seen",): 4.0}
        assert not hasattr(m, "seen")
        kinds = {type(node) for _, node in ab.graph.iter_nodes(m)}
        assert kinds == {Box, nnx.Param}
        assert ab.find_aliases(m) == [[("a", "s"), ("b", "s")]]

    def test_a_changed_kind_and_a_wrong_path_are_refused(self):
        m = Box(v=param())
        with pytest.raises(AnabranchError, match="BatchStat"):
            ab.update(m, ab.state(Box(v=nnx.BatchStat(jnp.array(1.0)))))
        with pytest.raises(AnabranchError, match="w"):
            ab.update(m, {"w": jnp.array(1.0)})

    def test_graphdefs_are_equal_hashable_and_picklable(self):
        import pickle

        a, b = ab.graphdef(boxes()["m"]), ab.graphdef(boxes()["m"])
        assert a is b
        assert pickle.loads(pickle.dumps(a)) == a

    def test_manual_contexts_write_back(self):
        m = boxes()["m"]

        @jax.jit
        def inner(graphdef, state):
            with ab.graph.merge_context("here") as ctx:
                twin = ctx.merge(graphdef, state)
            twin.a.v[...] += 1
            twin.late = param(3.0)
            with ab.graph.split_context("here") as ctx:
                return ctx.split(twin)

        with ab.graph.update_context("here"):
            with ab.graph.split_context("here") as ctx:
                graphdef, state = ctx.split(m)
            out = inner(graphdef, state)
            with ab.graph.merge_context("here") as ctx:
                assert ctx.merge(*out) is m
        assert m.a.v[...] == 2
        assert m.late[...] == 3
