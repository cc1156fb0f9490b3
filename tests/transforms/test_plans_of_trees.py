"""Plans for trees of arrays in one place: an optimiser's state in a Variable or an attribute."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab
from anabranch import transforms
from anabranch.errors import ConcurrentWriteError
from tests.transforms.plan_worlds import Walks


class Moments(NamedTuple):
    count: Any
    first: Any
    second: Any = ()
    nothing: Any = None


class Model(ab.Module):
    def __init__(self) -> None:
        self.w, self.b = ab.Param(jnp.arange(3.0)), ab.Param(jnp.array(1.0))


class InVariable(ab.Module):
    def __init__(self, tree: Any) -> None:
        self.cell = ab.Variable(tree)

    @property
    def state(self) -> Any:
        return self.cell.value

    @state.setter
    def state(self, tree: Any) -> None:
        self.cell.value = tree


class InAttribute(ab.Module):
    def __init__(self, tree: Any) -> None:
        self.state = tree


PLACES = [InVariable, InAttribute]


def moments(model: Model) -> tuple[Any, ...]:
    state = ab.state(model)
    return (Moments(jnp.array(0), state, jax.tree.map(jnp.zeros_like, state)), ())


def step(model: Model, opt: Any, x: Any) -> Any:
    old, rest = opt.state
    first = jax.tree.map(lambda m: 0.5 * m + x, old.first)
    opt.state = (old._replace(count=old.count + 1, first=first), rest)
    ab.update(model, first)
    return opt.state[0].count


@pytest.fixture
def walks(monkeypatch):
    return Walks(monkeypatch)


def arrays_of(opt: Any) -> list[Any]:
    return [x.tolist() for x in jax.tree.leaves(opt.state)]


@pytest.mark.parametrize("place", PLACES)
def test_a_step_is_not_walked_and_does_what_it_does_plainly(place, walks):
    model, plain = Model(), Model()
    opt, plain_opt = place(moments(model)), place(moments(plain))
    jitted = transforms.jit(step)
    jitted(model, opt, 1.0)
    step(plain, plain_opt, 1.0)
    for i in range(2, 6):
        second = opt.state[0].second
        assert walks.of(jitted, model, opt, 1.0) == 0
        step(plain, plain_opt, 1.0)
        assert jax.tree.structure(opt.state) == jax.tree.structure(plain_opt.state)
        assert arrays_of(opt) == arrays_of(plain_opt)
        assert type(opt.state[0]) is Moments
        assert model.w.value is opt.state[0].first["w"]
        assert opt.state[0].second["w"] is second["w"]
        assert int(opt.state[0].count) == i


def replaced(opt: Any, **fields: Any) -> None:
    old, rest = opt.state
    opt.state = (old._replace(**fields), rest)


DOORS = {
    "another value": lambda o: replaced(o, count=jnp.array(7)),
    "another dtype": lambda o: replaced(o, count=jnp.array(7.0)),
    "an array in the place of None": lambda o: replaced(o, nothing=jnp.ones(2)),
    "None in the place of an array": lambda o: replaced(o, count=None),
    "a number": lambda o: replaced(o, count=3),
    "a list": lambda o: replaced(o, second=[jnp.ones(1)]),
    "another type": lambda o: setattr(o, "state", (tuple(o.state[0]), ())),
    "no tree at all": lambda o: setattr(o, "state", jnp.ones(3)),
    "nothing": lambda o: setattr(o, "state", None),
}


def look(opt: Any) -> Any:
    def shown(x: Any) -> Any:
        if isinstance(x, ab.Variable):
            return ("variable", x.value)
        if isinstance(x, (tuple, list)):
            return (type(x).__name__, *map(shown, x))
        if isinstance(x, ab.State):
            return tuple(x.leaves)
        return x

    return shown(opt.state)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("place", PLACES)
def test_a_change_is_seen_at_the_very_next_call(place, door):
    opt, jitted = place(moments(Model())), transforms.jit(look)
    jitted(opt)
    jitted(opt)
    DOORS[door](opt)
    for _ in range(2):
        found, expected = jitted(opt), look(opt)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert (type(x), jnp.all(x == y)) == (type(y), True)


def test_a_variable_in_the_place_of_an_array_is_seen():
    opt, jitted = InAttribute(moments(Model())), transforms.jit(look)
    jitted(opt)
    jitted(opt)
    variable = ab.Variable(jnp.array(3))
    replaced(opt, count=variable)
    assert jitted(opt)[1][1] == ("variable", 3)
    variable.value = jnp.array(4)
    assert jitted(opt)[1][1] == ("variable", 4)


@jax.tree_util.register_pytree_node_class
class Scaled:
    def __init__(self, x: Any, by: Any) -> None:
        self.x, self.by = x, by

    def tree_flatten(self) -> Any:
        return (self.x,), self.by

    @classmethod
    def tree_unflatten(cls, by: Any, children: Any) -> Any:
        return cls(*children, by)


@pytest.mark.parametrize("place", PLACES)
def test_a_static_part_is_compared_by_type_too(place):
    opt = place((Scaled(jnp.ones(2), 1), jnp.zeros(1)))
    jitted = transforms.jit(lambda opt: type(opt.state[0].by).__name__)
    jitted(opt)
    jitted(opt)
    for by, name in ((True, "bool"), (1.0, "float"), (1, "int")):
        opt.state = (Scaled(jnp.ones(2), by), opt.state[1])  # equal, to JAX
        assert jitted(opt) == name
        assert jitted(opt) == name


@pytest.mark.parametrize("place", PLACES)
def test_what_one_function_writes_another_one_reads(place):
    model = Model()
    opt = place(moments(model))
    jitted, read = transforms.jit(step), transforms.jit(lambda o: o.state[0].first["w"] + 0)
    for _ in range(4):
        jitted(model, opt, 1.0)
        assert read(opt).tolist() == opt.state[0].first["w"].tolist()


@pytest.mark.parametrize("calls", [1, 4], ids=["by the plan", "by its follower"])
@pytest.mark.parametrize("place", PLACES)
def test_a_tree_that_is_replaced_while_the_function_runs_is_not_lost(place, calls):
    model = Model()
    opt = place(moments(model))
    jitted = transforms.jit(step)
    for _ in range(calls):
        jitted(model, opt, 1.0)
    before, other = model.w.value, moments(Model())
    meddling(jitted, lambda: setattr(opt, "state", other))
    with pytest.raises(ConcurrentWriteError, match=r"InVariable|InAttribute|cell"):
        jitted(model, opt, 1.0)
    assert opt.state is other
    assert model.w.value is before


def meddling(jitted: Any, action: Any) -> None:
    """Let something happen when the compiled function has run."""
    (plan,) = jitted._plans
    function = plan.function

    def meddled(*leaves: Any) -> Any:
        results = function(*leaves)
        action()
        return results

    plan.function = meddled
    for follower in jitted._followers.values():
        follower.__globals__["function"] = meddled


def test_a_failure_while_writing_puts_back_what_was_there():
    model = Model()
    opts = InAttribute(moments(model)), InAttribute(moments(model))

    def both(model: Model, a: Any, b: Any) -> None:
        step(model, a, 1.0)
        step(model, b, 2.0)

    jitted = transforms.jit(both)
    for _ in range(3):
        jitted(model, *opts)
    before = [model.w.value, opts[0].state, opts[1].state]
    (plan,) = jitted._plans
    setters = plan.latest.writer._setters

    def failing(*args: Any) -> None:
        setters[1] = set_item
        raise KeyboardInterrupt

    set_item, setters[1] = setters[1], failing
    with pytest.raises(KeyboardInterrupt):
        jitted(model, *opts)
    after = [model.w.value, opts[0].state, opts[1].state]
    assert all(x is y for x, y in zip(after, before, strict=True))
    jitted(model, *opts)
    assert int(opts[0].state[0].count) == int(opts[1].state[0].count) == 4


def test_an_interrupt_when_all_has_been_written_undoes_all():
    model = Model()
    opt = InAttribute(moments(model))
    jitted = transforms.jit(step)
    for _ in range(4):
        jitted(model, opt, 1.0)
    before = [model.w.value, model.b.value, opt.state]
    (plan,) = jitted._plans
    writer = plan.latest.writer
    replacing = writer.replacing

    def interrupted(*args: Any) -> Any:
        del writer.replacing
        same, writing = replacing(*args)

        def to_the_end() -> Any:
            yield from writing
            raise KeyboardInterrupt

        return same, to_the_end()

    writer.replacing = interrupted
    with pytest.raises(KeyboardInterrupt):
        jitted(model, opt, 1.0)
    after = [model.w.value, model.b.value, opt.state]
    assert all(x is y for x, y in zip(after, before, strict=True))
    assert int(jitted(model, opt, 1.0)) == 5
    assert model.w.value is opt.state[0].first["w"]


def test_arrays_that_change_places_within_a_tree_are_the_same_arrays(walks):
    def swap(opt: Any) -> None:
        (a, b), rest = opt.state
        opt.state = ((b, a), rest)

    a, b = jnp.ones(2), jnp.zeros(2)
    opt, jitted = InAttribute(((a, b), (a,))), transforms.jit(swap)
    jitted(opt)
    assert opt.state[0][0] is b
    assert walks.of(jitted, opt) == 0
    assert opt.state[0][0] is a
    assert opt.state[0][1] is b
    assert opt.state[1][0] is a


class Empty(NamedTuple):
    pass


class Other(NamedTuple):
    pass


WITHOUT_ARRAYS: tuple[Any, ...] = (
    None, (), [], {}, Empty(), Other(), (None,), ((), None), (Empty(), Empty()), {"a": None}, [()],
)  # fmt: skip


@pytest.mark.parametrize("tree", WITHOUT_ARRAYS, ids=repr)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("writes", [False, True])
def test_a_tree_without_arrays_is_planned(place, tree, writes, walks):
    """As the state of `optax.sgd`, which a step puts in its place anew."""

    def count(model: Model, opt: Any) -> None:
        model.b.value += 1
        if writes:
            opt.state = jax.tree.map(lambda x: x, opt.state)

    model, opt = Model(), place(jax.tree.map(lambda x: x, tree))
    jitted = transforms.jit(count)
    for i in range(8):
        walked = walks.of(jitted, model, opt)
        assert float(model.b.value) == i + 2
        assert opt.state == tree
        assert type(opt.state) is type(tree)
    assert walked == 0


@pytest.mark.filterwarnings("ignore::anabranch.errors.RetraceWarning")
@pytest.mark.parametrize("calls", [1, 2, 5])
@pytest.mark.parametrize("place", PLACES)
def test_a_change_of_a_tree_without_arrays_is_seen(place, calls):
    values = [*WITHOUT_ARRAYS, jnp.ones(2), (jnp.ones(2),), (Empty(), jnp.ones(2)), {"a": ()}]

    def text(opt: Any) -> str:
        return repr(jax.tree.map(lambda x: x.shape, opt.state))

    def swap(opt: Any, to: Any) -> Any:
        before, opt.state = opt.state, to
        return before, text(opt)

    reads, swaps = transforms.jit(text), transforms.jit(swap)
    opt = place(None)
    for before in values:
        for after in values:
            opt.state = before
            for _ in range(calls):
                assert reads(opt) == text(opt)
            found, said = swaps(opt, after)
            assert type(found) is type(before)
            assert jax.tree.structure(found) == jax.tree.structure(before)
            assert jax.tree.structure(opt.state) == jax.tree.structure(after)
            assert said == text(opt) == reads(opt)


class Mode(enum.StrEnum):
    FAST = "fast"


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["x", "y"], meta_fields=["mode", "size"]
)
@dataclasses.dataclass(frozen=True)
class Registered:
    x: Any
    y: Any
    mode: Any = "fast"
    size: Any = 1


@pytest.mark.parametrize("place", PLACES)
def test_values_of_registered_classes_are_trees(place, walks):
    def move(opt: Any, more: Any) -> Any:
        old = opt.state
        opt.state = dataclasses.replace(old, x=old.x + 1, y=(old.x, more))
        return old.size

    opt, jitted = place(Registered(jnp.zeros(2), (jnp.zeros(2), jnp.ones(1)))), transforms.jit(move)
    for i in range(8):
        walked = walks.of(jitted, opt, jnp.ones(1))
        assert type(opt.state) is Registered
        assert opt.state.x.tolist() == [i + 1.0] * 2
        assert opt.state.y[0].tolist() == [float(i)] * 2
    assert walked == 0


@pytest.mark.filterwarnings("ignore::anabranch.errors.RetraceWarning")
@pytest.mark.parametrize("calls", [1, 2, 6])
@pytest.mark.parametrize("place", [*PLACES, None])
def test_static_parts_of_registered_classes_are_compared_by_type(place, calls):
    def text(opt: Any) -> str:
        state = opt if place is None else opt.state
        return f"{type(state.mode).__name__} {state.size!r}"

    jitted, x = transforms.jit(text), jnp.ones(2)
    opt = None if place is None else place(Registered(x, x))
    for changes in ({}, {"size": True}, {"size": 1.0}, {"mode": Mode.FAST}, {}, {"size": 2}):
        tree = Registered(x, (x,) * 30, **changes)
        if place is None:
            opt = tree
        else:
            opt.state = tree
        for _ in range(calls):
            assert jitted(opt) == text(opt)


@pytest.mark.parametrize("place", PLACES)
def test_a_state_without_some_of_its_arrays_is_followed(place):
    """As those of `optax.masked`, which have an empty named tuple in their place."""
    masked = jax.tree.map(lambda x: x if x.ndim else Empty(), ab.state(Model()))
    opt = place((masked, jnp.array(0)))

    def count(opt: Any) -> None:
        opt.state = (jax.tree.map(lambda x: x + 1, opt.state[0]), opt.state[1] + 1)

    jitted = transforms.jit(count)
    for i in range(6):
        jitted(opt)
        assert opt.state[0]["b"] == Empty()
        assert opt.state[0]["w"].tolist() == [i + 1.0, i + 2.0, i + 3.0]
    assert jitted._followers


class Counting(ab.Module):
    def __init__(self, held: Any) -> None:
        self.n, self.held = jnp.array(0.0), held
        self.table = {"held": held}

    def bound(self) -> None: ...


def increase(m: Counting) -> None:
    m.n = m.n + 1
    m.table["n"] = m.n


LOOPS: dict[str, Any] = {
    "plain": increase,
    "scan": lambda m: ab.scan(lambda c, _: (increase(m), (c, c))[1], length=3)(m.n, None),
    "fori": lambda m: ab.fori_loop(0, 3, lambda i, c: (increase(m), c)[1], m.n),
    "while": lambda m: ab.while_loop(lambda c: c < 3, lambda c: (increase(m), c + 1)[1], m.n * 0),
    "vmap": lambda m: ab.vmap(lambda m, x: increase(m), in_axes=(None, 0))(m, jnp.ones(3)),
    "grad": lambda m: ab.grad(lambda x: (increase(m), x**2)[1])(1.0),
    "remat": ab.remat(increase),
    "cond": lambda m: ab.cond(m.n > -1, increase, increase, m),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_value_that_nobody_writes_is_left_alone(loop, compiled, walks):
    """As an optax transformation in an attribute of a model that is trained in a loop."""
    values: list[Any] = [
        3.5,
        (1000, 2.5, "text"),
        (jnp.tanh,),
        Moments(1, 2.5),
        Moments(jnp.ones(2), ()),
        functools.partial(jnp.sum, axis=0),
        functools.partial(jnp.add, jnp.ones(2)),
        Counting(0).bound,
        Registered(jnp.ones(2), ()),
    ]
    for value in values:
        model = Counting(value)
        model.table["n"] = model.n
        call = transforms.jit(LOOPS[loop]) if compiled else LOOPS[loop]
        for _ in range(4):
            walked = walks.of(call, model)
            assert model.held is value
            assert model.table["held"] is value
        assert walked == 0
        assert float(model.n) == float(model.table["n"]) >= 4
