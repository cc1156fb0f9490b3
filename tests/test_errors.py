"""Every class of `anabranch.errors` is explained on a page that is run; messages are short."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import inspect
import pickle
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anabranch as ab
from anabranch import errors

ROOT = Path(__file__).resolve().parent.parent
CLASSES = {
    name: cls
    for name, cls in vars(errors).items()
    if inspect.isclass(cls) and issubclass(cls, errors.AnabranchError)
}
# Nothing on the page provokes these: it would take another environment.
WITHOUT_PROGRAM = {"MissingExtraError", "UnsupportedJaxError"}


@dataclasses.dataclass(frozen=True)
class Section:
    """What the page says about one class."""

    name: str
    wrong: str
    message: str
    right: str


def read_page() -> tuple[str, dict[str, Section | None]]:
    """Return what all programs begin with, and the sections by class."""
    head, *rest = (ROOT / "docs" / "errors.md").read_text().split("\n## ")
    preamble = blocks(head, "python")[0]
    sections: dict[str, Section | None] = {}
    for text in rest:
        name = text.partition("\n")[0].strip()
        wrong, message, right = (blocks(text, k) for k in ("python no-run", "text", "python"))
        assert len(wrong) == len(message) == len(right) <= 1, name
        sections[name] = Section(name, wrong[0], message[0], right[0]) if wrong else None
    return preamble, sections


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


PREAMBLE, SECTIONS = read_page()
WITH_PROGRAM = [section for section in SECTIONS.values() if section is not None]


def test_every_class_is_on_the_page():
    assert set(SECTIONS) == set(CLASSES) - {"AnabranchError"}
    assert {name for name, section in SECTIONS.items() if section is None} == WITHOUT_PROGRAM


def run(program: str) -> None:
    # jit, for one, keeps what it traced by the identity of functions: each program has its own
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(PREAMBLE, "preamble.py", "exec"), names)
    exec(compile(program, "program.py", "exec"), names)


@pytest.mark.parametrize("section", WITH_PROGRAM, ids=lambda section: section.name)
class TestPage:
    def test_the_wrong_program_raises_what_the_page_says(self, section):
        with pytest.raises(CLASSES[section.name]) as info:
            run(section.wrong)
        assert type(info.value) is CLASSES[section.name]
        address = re.compile(r"0x[0-9a-f]+|<node \d+>")
        found, shown = (address.sub("...", s) for s in (str(info.value), section.message))
        assert found.strip() == shown.strip()

    def test_the_right_program_runs(self, section):
        run(section.right)


def raised_in_package() -> Iterator[tuple[str, str]]:
    """Yield place and class of everything that is raised by its name."""
    for path in sorted((ROOT / "anabranch").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.exc.func)


def test_every_failure_has_a_class_of_ours():
    # AttributeError: of names that Python looks up itself, whose messages nobody sees
    allowed = {"NotImplementedError", "AttributeError"}
    known = set(vars(builtins)) - allowed
    builtin = [(place, name) for place, name in raised_in_package() if name in known]
    assert builtin == []


def test_a_key_error_shows_its_message_without_quotes():
    assert str(errors.MissingPathError("a 'b'")) == "a 'b'"
    assert str(errors.MissingPathError("a", 1)) == "('a', 1)"


# Messages of a model of 1,000 layers with names and statics that are far too long.

LONG = "very_long_name_" * 400  # 6,000 characters


@dataclasses.dataclass(frozen=True)
class Setting:
    number: int

    def __repr__(self) -> str:
        return f"Setting({LONG}{self.number})"


class Layer(ab.Module):
    def __init__(self, number: int) -> None:
        setattr(self, f"{LONG}{number}", ab.Param(jnp.ones(3)))
        self.setting = Setting(number)
        self.rngs: Any = None

    @property
    def w(self) -> ab.Variable:
        return next(v for v in vars(self).values() if isinstance(v, ab.Param))


class Opaque:
    def __init__(self) -> None:
        self.held = ab.Variable(0)

    def __repr__(self) -> str:
        return LONG


class Big(ab.Module):
    def __init__(self) -> None:
        for number in range(1_000):
            setattr(self, f"layer_{LONG}{number}", Layer(number))

    def layers(self) -> list[Layer]:
        return [layer for layer in vars(self).values() if isinstance(layer, Layer)]


@functools.cache
def shared() -> Big:
    """A big model that no program changes."""
    return Big()


def each(write: Callable[[Layer], None]) -> Callable[..., None]:
    def run(model: Big, *_: Any) -> None:
        for layer in model.layers():
            write(layer)

    run.__qualname__ = LONG
    return run


def write_axis(model: Big, x: Any) -> None:
    for layer in model.layers():
        layer.w.value = x


def with_opaques() -> Big:
    model = Big()
    for layer in model.layers():
        layer.setting = Opaque()
    return model


def with_rngs() -> Big:
    model = Big()
    for layer in model.layers():
        layer.rngs = ab.Rngs(0)
    return model


def changed_meanwhile() -> None:
    model = Big()
    elsewhere = weakref.ref(model)

    def other() -> None:
        found = elsewhere()
        assert found is not None
        each(lambda layer: setattr(layer.w, "value", jnp.zeros(3)))(found)

    def step(model: Big) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        each(lambda layer: setattr(layer.w, "value", layer.w.value + 1))(model)

    ab.jit(step)(model)


def kept_twin() -> None:
    kept: list[Any] = []
    ab.jit(lambda model: kept.append(model.layers()[0]))(shared())
    getattr(kept[0], LONG)


def backward_rule() -> None:
    function = ab.custom_vjp(lambda model, x: x)

    def backward(model: Big, cotangent: Any) -> Any:
        each(lambda layer: setattr(layer.w, "value", cotangent))(model)
        return None, cotangent

    function.defvjp(lambda model, x: (x, model), backward)
    ab.grad(function, argnums=1)(Big(), 1.0)


def stale_captures() -> None:
    table = {f"{LONG}{i}": Setting(i) for i in range(100)}
    with ab.debug.check_captures(lambda: table):
        for i in range(100):
            table[f"{LONG}{i}"] = Setting(-1)


def no_rule() -> None:
    def function(x: Any) -> Any:
        return x

    function.__qualname__ = LONG
    ab.custom_vjp(function)(1.0)


def unset() -> Any:
    return ab.JitAwareContextVar(LONG)


def behind_boundary() -> None:
    var = unset()

    def read(x: Any) -> Any:
        return var.get() * x

    read.__qualname__ = read.__name__ = LONG
    with var.set_on_enter(2.0):
        jax.jit(read)(1.0)


def missing_state() -> None:
    class Node(ab.StatefulNode[Any]):
        pass

    Node.__qualname__ = LONG
    with ab.set_state_dict_on_enter({Node().unique_id: 0 for _ in range(1_000)}):
        Node().get_cur_state()


def state_of_other_shapes() -> ab.State:
    return jax.tree.map(lambda x: jnp.zeros(5), ab.state(shared()))


def twice() -> list[Any]:
    model = Big()
    return [model, model]


def one_setting(model: Big) -> None:
    for layer in model.layers():
        layer.setting = Setting(-1)


def point() -> None:
    @dataclasses.dataclass(frozen=True)
    class Value:
        x: Any

    Value.__qualname__ = Value.__name__ = LONG
    ab.jit(lambda v: object.__setattr__(v, "x", v.x + 1))(Value(jnp.ones(3)))


def hoist_out_of_loop() -> None:
    def step(total: Any, x: Any) -> Any:
        return total + ab.hoist(lambda **_: 1.0, **{f"{LONG}{i}": x for i in range(50)}), None

    jax.lax.scan(step, 0.0, jnp.ones(3))


def call_with_donated() -> None:
    held = {LONG: ab.Param(jnp.ones(3))}
    step = ab.jit(lambda held: setattr(held[LONG], "value", held[LONG] * 2), donate="written")
    other = {LONG: ab.Param(held[LONG].value)}
    step(held)
    step(other)


PROVOKED: dict[str, list[Callable[[], Any]]] = {
    "ArgumentError": [
        lambda: ab.jit(Setting(0)),
        lambda: ab.map(lambda x: x, jnp.ones(3), batch_size=Setting(0)),
        lambda: ab.JitAwareContextVar(Setting(0)),
        lambda: ab.JitAwareContextVar("x", default_factory=Setting(0)),
        lambda: ab.KeyStream(Setting(0)),
        lambda: ab.KeyStream(jax.random.key(0), 10**5_000),
        lambda: ab.sow(shared(), f"{LONG}/", 1.0),
        lambda: ab.fori_loop(0, 10**4_000, lambda i, x: x, 0.0),
        lambda: ab.Rngs(Setting(0)),
        lambda: ab.capture(lambda x: x, Setting(0)),
    ],
    "CopyError": [lambda: pickle.dumps(unset())],
    "ReadOnlyError": [lambda: vars(shared()).__setitem__(LONG, 1)],
    "ContextValueNotSetError": [lambda: unset().get()],
    "BehindBoundaryError": [behind_boundary],
    "MissingStateError": [missing_state],
    "ContextExitError": [lambda: unset().set_on_enter(1).__exit__(None, None, None)],
    "NodeTypeError": [
        lambda: ab.jit(each(lambda layer: None))(with_opaques()),
        lambda: ab.split(with_opaques()),
    ],
    "StaticValueError": [
        lambda: ab.jit(lambda x: x, static_argnums=0)([LONG] * 1_000),
        lambda: ab.Variable(1.0, **{LONG: [1]}),
    ],
    "ValueWriteError": [point],
    "AliasError": [
        lambda: ab.vmap(lambda m: m[0].layers()[0].w.sum(), in_axes=([0, None],))(twice()),
    ],
    "BroadcastWriteError": [
        lambda: ab.vmap(write_axis, in_axes=(None, 0))(Big(), jnp.ones((4, 3))),
    ],
    "SharedStreamError": [
        lambda: ab.vmap(each(lambda layer: layer.rngs()), in_axes=(None, 0))(
            with_rngs(), jnp.ones(4)
        ),
    ],
    "StructureError": [
        lambda: ab.cond(True, one_setting, lambda model: None, Big()),
        lambda: ab.scan(each(lambda layer: setattr(layer, LONG, 1)))(Big(), jnp.ones(3)),
        lambda: ab.vmap(lambda m: None, axis_size=5)(shared()),
        lambda: ab.vmap(lambda m: None, in_axes=7)(shared()),
        lambda: ab.jvp(lambda m: 1.0, (shared(),), (state_of_other_shapes(),)),
        lambda: ab.vjp(lambda m: m, shared()),
        lambda: ab.map(each(lambda layer: setattr(layer.w, "value", 0.0)), shared()),
    ],
    "FilterError": [
        lambda: ab.split(shared(), ab.BatchStat),
        lambda: ab.split(shared(), Setting(0)),
        lambda: ab.grad(lambda m: 1.0, argnums=ab.DiffState(0, ab.BatchStat))(shared()),
    ],
    "UpdateError": [
        lambda: ab.update(Big(), state_of_other_shapes()),
        lambda: ab.update(Big(), {LONG: 1.0}),
        lambda: ab.merge(ab.graphdef(shared()), ab.State.from_flat({(LONG,): 1.0})),
    ],
    "DeletedArrayError": [call_with_donated],
    "MissingPathError": [
        lambda: ab.state(shared())[LONG],
        lambda: ab.state(shared())[LONG, LONG],
    ],
    "MissingStreamError": [
        lambda: ab.Rngs(**{f"{LONG}{i}": i for i in range(50)})[f"{LONG}x"],
        lambda: getattr(ab.Rngs(**{f"{LONG}{i}": i for i in range(50)}), f"{LONG}x"),
    ],
    "VariableAttributeError": [
        lambda: getattr(ab.Variable(1.0, **{f"{LONG}{i}": i for i in range(50)}), f"{LONG}x"),
        lambda: setattr(ab.Variable(1.0), LONG, 1.0),
        lambda: delattr(ab.Variable(1.0), LONG),
    ],
    "IndexWriteError": [
        lambda: ab.Variable(jnp.zeros((1,) * 30)).__setitem__(..., jnp.zeros((2,) * 20)),
    ],
    "TraceLevelError": [lambda: ab.jit(lambda m: pickle.dumps(m.layers()[0].w))(shared())],
    "CapturedWriteError": [backward_rule],
    "StaleCaptureError": [stale_captures],
    "HoistError": [hoist_out_of_loop],
    "SpentTwinError": [kept_twin],
    "MissingRuleError": [no_rule],
    "ConcurrentWriteError": [changed_meanwhile],
    "ContextTagError": [
        lambda: ab.split_context(LONG).__enter__(),
    ],
}


@pytest.mark.parametrize("name", sorted(set(CLASSES) - WITHOUT_PROGRAM - {"AnabranchError"}))
def test_messages_are_short_whatever_the_size_of_the_model(name):
    for number, program in enumerate(PROVOKED[name]):
        with pytest.raises(CLASSES[name]) as info:
            program()
        text = str(info.value)
        assert type(info.value) is CLASSES[name], (number, text[:300])
        assert len(text) <= 4_000, (number, len(text))
        assert len(text) > 30


def test_a_long_message_keeps_its_end():
    text = errors.bounded("path " * 2_000 + "write this instead")
    assert len(text) == 4_000
    assert text.startswith("path path")
    assert text.endswith("path write this instead")


def test_many_transforms_leave_room_for_the_message():
    error = errors.StructureError("path " * 2_000 + "write this instead")
    for number in range(50):
        error.pass_through("jit", f"{LONG}{number}")
    text = str(error)
    assert len(text) <= 4_000
    assert "write this instead\n  in jit of very_long" in text


# Messages of JAX, which knows parameters and indices of ours, and not the caller's paths.


class Small(ab.Module):
    def __init__(self) -> None:
        self.w = ab.Param(jnp.ones(3))


def branch(x: Any) -> Any:
    value = x.w.value if isinstance(x, Small) else x
    return x if jnp.sum(value) > 0 else value


def mesh() -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()[:8]), ("i",))


NONE = jax.sharding.PartitionSpec()
BRANCHING: dict[str, Callable[[], Any]] = {
    "jit": lambda: ab.jit(branch)(Small()),
    "jit in vmap": lambda: ab.vmap(ab.jit(branch), in_axes=None, axis_size=2)(Small()),
    "remat": lambda: ab.remat(branch)(Small()),
    "eval_shape": lambda: ab.eval_shape(branch, Small()),
    "make_jaxpr": lambda: ab.make_jaxpr(branch)(Small()),
    "cond": lambda: ab.cond(True, branch, branch, Small()),
    "scan": lambda: ab.scan(lambda c, x: (branch(c), x))(Small(), jnp.ones(3)),
    "while_loop": lambda: ab.while_loop(lambda m: True, branch, Small()),
}


@pytest.mark.parametrize("name", BRANCHING)
def test_messages_of_jax_name_paths(name):
    with pytest.raises(jax.errors.TracerBoolConversionError) as info:
        BRANCHING[name]()
    assert "the argument args[0]['w']" in str(info.value)
    assert "/anabranch/" not in str(info.value)


def test_messages_of_jax_name_what_is_sliced_and_counted():
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"argument args\[1\]"):
        ab.scan(lambda c, x: (c, branch(x)))(0.0, jnp.ones(3))
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"argument args\[0\]\."):
        ab.fori_loop(0, 3, lambda i, x: branch(i), 0)
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"argument args\[1\]\['w'\]"):
        ab.fori_loop(0, 3, lambda i, m: branch(m), Small())


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ab.jit(lambda m, d: d["a"][0])(Small(), x),
        lambda x: ab.cond(True, lambda m, d: 1, lambda m, d: 1, Small(), x),
        lambda x: ab.scan(lambda m, d: (m, None), in_axes=(ab.Carry, None), length=2)(Small(), x),
    ],
)
def test_an_integer_that_overflows_is_named_by_its_path(call):
    with pytest.raises(OverflowError, match=r"args\[1\]\['a'\]\[0\]"):
        call({"a": [2**70]})


def test_a_compiled_call_names_the_argument_of_another_shape():
    compiled = ab.jit(lambda m, x: m.w * x).lower(Small(), jnp.ones(3)).compile()
    with pytest.raises(TypeError, match=r"'args\[1\]' compiled with float32\[3\]"):
        compiled(Small(), jnp.ones((2, 3)))
