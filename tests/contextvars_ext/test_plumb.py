"""`plumb_and_transform`: values in, values out, any signature, any transform."""

from __future__ import annotations

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from anabranch.contextvars_ext import JitAwareContextVar, plumb_and_transform
from anabranch.errors import ContextValueNotSetError, StructureError
from tests.contextvars_ext import nesting

SCALE = JitAwareContextVar("scale")
COUNTS = JitAwareContextVar("counts")


def plumb_scale(fn=None, *, transform=jax.jit):
    return plumb_and_transform(
        fn,
        transform_to_apply=transform,
        compute_extra_input_before=SCALE.get,
        create_context_managers_after=lambda scale: [SCALE.set_on_enter(scale)],
    )


def plumb_counts(fn=None, *, transform=jax.jit):
    return plumb_and_transform(
        fn,
        transform_to_apply=transform,
        compute_extra_input_before=COUNTS.get,
        create_context_managers_after=lambda counts: [COUNTS.set_on_enter(dict(counts))],
        compute_extra_output_after=COUNTS.get,
        consume_extra_output=lambda counts: COUNTS.get().update(counts),
    )


def test_a_plumbed_value_is_traced_and_always_fresh():
    traces = []

    @plumb_scale
    def scaled(x):
        traces.append(1)
        return SCALE.get() * x

    for value in (2.0, 3.0, 4.0):
        with SCALE.set_on_enter(value):
            np.testing.assert_allclose(scaled(5.0), 5.0 * value)
    assert len(traces) == 1


def test_it_decorates_with_and_without_the_callable():
    def scaled(x):
        return SCALE.get() * x

    with SCALE.set_on_enter(2.0):
        assert plumb_scale(scaled)(3.0) == 6.0
        assert plumb_scale()(scaled)(3.0) == 6.0


def test_without_a_value_outside_the_call_fails_before_it_traces():
    @plumb_scale
    def never_traced(x):
        raise AssertionError("traced")

    with pytest.raises(ContextValueNotSetError, match="'scale'"):
        never_traced(1.0)


@pytest.mark.parametrize(
    "name", [name for name in nesting.BOUNDARIES if name not in {"pmap", "shard_map"}]
)
def test_it_takes_a_value_across(name):
    def transform(inner):
        return lambda scale, x: nesting.BOUNDARIES[name](functools.partial(inner, scale))(x)

    scaled = plumb_scale(lambda x: SCALE.get() * x, transform=transform)
    for value in (2.0, 3.0):
        with SCALE.set_on_enter(value):
            np.testing.assert_allclose(scaled(np.float32(1.0)), value)


def test_vmap_counts_the_extra_input_as_the_first():
    scaled = plumb_scale(
        lambda x: SCALE.get() * x, transform=functools.partial(jax.vmap, in_axes=(None, 0))
    )
    with SCALE.set_on_enter(2.0):
        np.testing.assert_allclose(scaled(jnp.arange(3.0)), [0.0, 2.0, 4.0])
    per_lane = plumb_scale(lambda x: SCALE.get() * x, transform=jax.vmap)
    with SCALE.set_on_enter(jnp.array([1.0, 10.0])):
        np.testing.assert_allclose(per_lane(jnp.array([3.0, 4.0])), [3.0, 40.0])


def test_pmap_and_shard_map_take_a_broadcast_value():
    scaled = plumb_scale(
        lambda x: SCALE.get() * x, transform=functools.partial(jax.pmap, in_axes=(None, 0))
    )
    with SCALE.set_on_enter(2.0):
        np.testing.assert_allclose(scaled(jnp.arange(8.0)), 2.0 * np.arange(8.0))
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = plumb_scale(
        lambda x: SCALE.get() * x,
        transform=functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(spec(), spec("i")), out_specs=spec("i")
        ),
    )
    with SCALE.set_on_enter(jnp.float32(3.0)):
        np.testing.assert_allclose(sharded(jnp.arange(8.0)), 3.0 * np.arange(8.0))


def test_gradients_flow_through_the_extra_input():
    scaled = plumb_scale(lambda x: SCALE.get() ** 2 * x)

    def loss(scale):
        with SCALE.set_on_enter(scale):
            return scaled(5.0)

    np.testing.assert_allclose(jax.grad(loss)(3.0), 30.0)


def test_grad_of_an_argument_counts_the_extra_input():
    derivative = plumb_scale(
        lambda x: SCALE.get() * x**2, transform=functools.partial(jax.grad, argnums=1)
    )
    with SCALE.set_on_enter(3.0):
        np.testing.assert_allclose(derivative(2.0), 12.0)


def test_it_nests():
    @plumb_scale
    def inner(x):
        return SCALE.get() * x

    @plumb_scale
    def outer(x):
        with SCALE.set_on_enter(SCALE.get() + 1.0):
            return inner(x)

    for value in (1.0, 2.0):
        with SCALE.set_on_enter(value):
            np.testing.assert_allclose(outer(10.0), (value + 1.0) * 10.0)


@pytest.mark.parametrize("how", ["names", "numbers"])
def test_static_arguments_are_found_by_name_and_by_number(how):
    seen = []
    options = {"static_argnames": ("n", "mode")} if how == "names" else {"static_argnums": (2, 3)}

    @plumb_scale(transform=functools.partial(jax.jit, **options))
    def repeated(x, n, mode="plain"):
        seen.append((n, mode))
        return SCALE.get() * x * n

    with SCALE.set_on_enter(2.0):
        assert repeated(1.0, 3) == 6.0
        assert repeated(1.0, 4, "other") == 8.0
    assert seen == [(3, "plain"), (4, "other")]


def test_any_signature():
    @plumb_scale
    def everything(a, /, b, *rest, c, extra_input=0.0, **others):
        return SCALE.get() * (a + 10 * b + sum(rest) + c + extra_input + sum(others.values()))

    with SCALE.set_on_enter(2.0):
        result = everything(1.0, 2.0, 100.0, 200.0, c=1000.0, d=2000.0, extra_input=5000.0)
    np.testing.assert_allclose(result, 2.0 * 8321.0)
    with SCALE.set_on_enter(2.0), pytest.raises(TypeError, match="missing"):
        everything(1.0)


def test_the_looks_of_the_function_are_kept():
    @plumb_scale
    def scaled(x: float, *, y: int = 3) -> float:
        """Scale."""
        return SCALE.get() * x * y

    assert (scaled.__name__, scaled.__doc__) == ("scaled", "Scale.")
    assert list(inspect.signature(scaled).parameters) == ["x", "y"]


def test_the_transform_sees_one_more_parameter_that_clashes_with_none():
    seen = []

    def spy(inner):
        seen.append((inner.__name__, str(inspect.signature(inner))))
        return inner

    plumb_scale(lambda extra_input, extra_input_: 0.0, transform=spy)
    plumb_scale(max, transform=spy)
    assert seen[0][1] == "(extra_input__, /, extra_input, extra_input_)"
    assert seen[1] == ("max", "(extra_input, /, *args, **kwargs)")


def test_messages_of_jax_point_to_the_function_of_the_user():
    other = JitAwareContextVar("other", default=1.0)

    @plumb_scale
    def reads_another(x):
        return other.get() * x

    with (
        SCALE.set_on_enter(2.0),
        pytest.raises(LookupError, match=r"reads_another at .*test_plumb"),
    ):
        reads_another(1.0)


def test_methods_class_methods_static_methods_and_callable_objects():
    class Model:
        offset = 100.0

        def __init__(self, weight):
            self.weight = weight

        @plumb_scale(transform=functools.partial(jax.jit, static_argnums=1))
        def scaled(self, x):
            return SCALE.get() * x * self.weight

        @classmethod
        @plumb_scale(transform=functools.partial(jax.jit, static_argnums=1))
        def shifted(cls, x):
            return SCALE.get() * x + cls.offset

        @staticmethod
        @plumb_scale
        def plain(x):
            return SCALE.get() * x

        def __call__(self, x):
            return SCALE.get() + self.weight * x

    model = Model(10.0)
    with SCALE.set_on_enter(2.0):
        assert model.scaled(3.0) == 60.0
        assert Model.shifted(3.0) == 106.0
        assert model.plain(3.0) == 6.0
        assert plumb_scale(model)(3.0) == 32.0
        assert plumb_scale(functools.partial(model, 4.0))() == 42.0


def test_several_contexts_are_entered_in_order_and_left_in_reverse():
    log = []

    @contextlib.contextmanager
    def note(name):
        log.append(f"+{name}")
        yield
        log.append(f"-{name}")

    fn = plumb_and_transform(
        lambda: log.append("call"),
        transform_to_apply=lambda inner: inner,
        compute_extra_input_before=lambda: ["a", "b"],
        create_context_managers_after=lambda names: map(note, names),
    )
    assert fn() is None
    assert log == ["+a", "+b", "call", "-b", "-a"]


def test_something_else_than_context_managers_is_an_error_that_says_so():
    def fn_with(create):
        return plumb_and_transform(
            lambda: 1.0,
            transform_to_apply=jax.jit,
            compute_extra_input_before=lambda: 1.0,
            create_context_managers_after=create,
        )

    for create in (SCALE.set_on_enter, lambda _: None):
        with pytest.raises(TypeError, match="has to return an iterable of context managers"):
            fn_with(create)()
    with pytest.raises(TypeError, match="takes a function, not 3"):
        plumb_scale(3)


# Values out


def count(name):
    COUNTS.get()[name] = COUNTS.get()[name] + 1


def test_values_come_out_on_every_call_of_a_cached_program():
    traces = []

    @plumb_counts
    def counted(x):
        traces.append(1)
        count("calls")
        return 2.0 * x

    with COUNTS.set_on_enter({"calls": 0, "others": 7}) as counts:
        assert [float(counted(x)) for x in (1.0, 2.0, 3.0)] == [2.0, 4.0, 6.0]
    assert {name: int(n) for name, n in counts.items()} == {"calls": 3, "others": 7}
    assert len(traces) == 1


def test_values_come_out_of_nested_plumbing():
    @plumb_counts
    def inner(x):
        count("inner")
        return x + 1.0

    @plumb_counts
    def outer(x):
        count("outer")
        return inner(inner(x))

    with COUNTS.set_on_enter({"inner": 0, "outer": 0}) as counts:
        assert outer(0.0) == 2.0
        assert outer(1.0) == 3.0
    assert {name: int(n) for name, n in counts.items()} == {"inner": 4, "outer": 2}


def test_values_come_out_of_vmap_one_for_each_lane():
    outputs = []
    fn = plumb_and_transform(
        lambda x: SCALE.get() * x,
        transform_to_apply=jax.vmap,
        compute_extra_input_before=SCALE.get,
        create_context_managers_after=lambda scale: [SCALE.set_on_enter(scale)],
        compute_extra_output_after=lambda: SCALE.get() + 1.0,
        consume_extra_output=outputs.append,
    )
    with SCALE.set_on_enter(jnp.array([1.0, 2.0])):
        np.testing.assert_allclose(fn(jnp.array([10.0, 20.0])), [10.0, 40.0])
    np.testing.assert_allclose(outputs, [[2.0, 3.0]])


def test_values_come_out_of_grad_as_auxiliary_output():
    gradient = plumb_counts(
        lambda x: (count("calls"), x**2)[1],
        transform=functools.partial(jax.grad, argnums=1, has_aux=True),
    )
    with COUNTS.set_on_enter({"calls": 0}) as counts:
        assert gradient(3.0) == 6.0
    assert counts == {"calls": 1}


def test_values_come_out_of_scan():
    def over_five(body):
        def run(counts, x):
            def step(carry, _):
                counts, x = carry
                x, counts = body(counts, x)
                return (counts, x), None

            (counts, x), _ = lax.scan(step, (counts, x), None, length=5)
            return x, counts

        return run

    doubled = plumb_counts(lambda x: (count("steps"), 2.0 * x)[1], transform=over_five)
    with COUNTS.set_on_enter({"steps": 0}) as counts:
        np.testing.assert_allclose(doubled(1.0), 32.0)
    assert int(counts["steps"]) == 5


def test_an_exception_closes_the_contexts_and_consumes_nothing():
    seen_after = []

    @plumb_counts
    def fails(x):
        count("calls")
        raise ZeroDivisionError("inside")

    def transform(inner):
        def run(*args):
            try:
                return inner(*args)
            finally:
                seen_after.append(COUNTS.get(None) is counts)

        return run

    counts = {"calls": 0}
    with COUNTS.set_on_enter(counts):
        with pytest.raises(ZeroDivisionError, match="inside"):
            fails(1.0)
        with pytest.raises(ZeroDivisionError, match="inside"):
            plumb_counts(inspect.unwrap(fails), transform=transform)(1.0)
        assert COUNTS.get() is counts
    assert counts == {"calls": 0}
    assert seen_after == [True]
    assert COUNTS.get(None) is None


def test_the_extra_output_is_computed_while_the_contexts_are_open():
    fn = plumb_and_transform(
        lambda: 1.0,
        transform_to_apply=jax.jit,
        compute_extra_input_before=lambda: 5.0,
        create_context_managers_after=lambda value: [SCALE.set_on_enter(value)],
        compute_extra_output_after=lambda: SCALE.get() + 1.0,
        consume_extra_output=lambda value: results.append(float(value)),
    )
    results = []
    assert fn() == 1.0
    assert results == [6.0]


def test_half_of_an_output_is_refused():
    for half in ({"compute_extra_output_after": dict}, {"consume_extra_output": print}):
        with pytest.raises(TypeError, match="give both or neither"):
            plumb_and_transform(
                lambda: 1.0,
                transform_to_apply=jax.jit,
                compute_extra_input_before=lambda: 1.0,
                create_context_managers_after=lambda _: [],
                **half,
            )


def test_a_transform_that_drops_the_extra_output_is_an_error_that_shows_an_adapter():
    dropped = plumb_counts(lambda x: x, transform=lambda inner: lambda c, x: inner(c, x)[0])
    with COUNTS.set_on_enter({}), pytest.raises(StructureError, match=r"has_aux=True"):
        dropped(1.0)


def test_the_transformed_function_is_found_in_the_closure():
    fn = plumb_scale(lambda x: x)
    assert type(fn.__closure__[2].cell_contents) is type(jax.jit(lambda x: x))
