"""Key streams, the default stream, samplers without keys, and compiled functions that draw."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from anabranch import contextvars_ext as cx
from anabranch.contextvars_ext import KeyStream, get_next_key, set_keystream_on_enter
from anabranch.errors import BehindBoundaryError


def data(key):
    return np.asarray(jax.random.key_data(key)) if key.dtype != np.uint32 else np.asarray(key)


def assert_same_key(one, other):
    np.testing.assert_array_equal(data(one), data(other))


@pytest.fixture(autouse=True)
def fresh_default_stream():
    cx.set_default_seed(0)
    yield
    cx.set_default_seed(0)


# KeyStream


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_keys_are_folded_in_one_after_the_other(make_key):
    key = make_key(3)
    stream = KeyStream(key)
    for n in range(3):
        assert stream.counter == n
        assert_same_key(stream.next_key(), jax.random.fold_in(key, n))
    assert stream.next_key().dtype == key.dtype


@pytest.mark.parametrize(
    "offset",
    [5, np.int64(5), np.uint8(5), jnp.int32(5), jnp.int8(5), jnp.uint32(5)],
    ids=lambda offset: type(offset).__name__ + str(getattr(offset, "dtype", "")),
)
def test_an_offset_moves_the_numbers(offset):
    stream = KeyStream(jax.random.key(0), offset)
    assert_same_key(stream.next_key(), jax.random.fold_in(jax.random.key(0), 5))
    assert_same_key(stream.next_key(), jax.random.fold_in(jax.random.key(0), 6))
    assert_same_key(KeyStream(jax.random.key(0), offset=offset).next_key(), cx_key(5))


def cx_key(n):
    return jax.random.fold_in(jax.random.key(0), n)


def test_a_narrow_offset_does_not_wrap():
    stream = KeyStream(jax.random.key(0), jnp.int8(127))
    keys = [stream.next_key() for _ in range(3)]
    for n, key in enumerate(keys):
        assert_same_key(key, cx_key(127 + n))


def test_key_and_offset_may_be_traced():
    @jax.jit
    def second(key, offset):
        stream = KeyStream(key, offset)
        stream.next_key()
        return stream.next_key()

    assert_same_key(second(jax.random.key(0), 10), cx_key(11))
    lanes = jax.vmap(second)(jax.random.split(jax.random.key(1), 3), jnp.arange(3))
    expected = [
        jax.random.fold_in(key, n + 1)
        for n, key in enumerate(jax.random.split(jax.random.key(1), 3))
    ]
    np.testing.assert_array_equal(data(lanes), np.stack([data(key) for key in expected]))


def test_threads_never_get_the_same_key():
    stream = KeyStream(jax.random.key(0))
    with ThreadPoolExecutor(4) as pool:
        keys = list(pool.map(lambda _: tuple(data(stream.next_key())), range(200)))
    assert stream.counter == 200
    assert set(keys) == {tuple(data(cx_key(n))) for n in range(200)}


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (0, TypeError, "starts from a key"),
        (None, TypeError, "starts from a key"),
        ("seed", TypeError, "starts from a key"),
        (np.zeros(2), TypeError, r"shape \(2,\) and dtype float64"),
        (np.zeros(2, np.int32), TypeError, "raw uint32 key"),
        (np.zeros(3, np.uint32), ValueError, "a vector of 2 words"),
        (np.zeros((4, 2), np.uint32), ValueError, "For several keys use jax.vmap"),
        (np.uint32(3), TypeError, "starts from a key"),
    ],
)
def test_what_is_no_key_is_refused(key, error, message):
    with pytest.raises(error, match=message):
        KeyStream(key)


def test_a_batch_of_keys_is_refused():
    with pytest.raises(ValueError, match=r"one key, not from an array of shape \(4,\)"):
        KeyStream(jax.random.split(jax.random.key(0), 4))


@pytest.mark.parametrize(
    ("offset", "error"),
    [
        (1.0, TypeError),
        (True, TypeError),
        (None, TypeError),
        (jnp.float32(1), TypeError),
        (jnp.arange(2), TypeError),
        (jnp.bool_(True), TypeError),
        (-1, ValueError),
        (2**32, ValueError),
    ],
)
def test_what_is_no_offset_is_refused(offset, error):
    with pytest.raises(error, match="The offset of a KeyStream"):
        KeyStream(jax.random.key(0), offset)


def test_streams_compare_by_identity_and_have_no_hash():
    one, other = KeyStream(jax.random.key(0)), KeyStream(jax.random.key(0))
    assert (one == [one][0], one == other) == (True, False)
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)
    with pytest.raises((TypeError, ValueError), match="hash"):
        jax.jit(lambda s: 0, static_argnums=0)(one)


def test_a_stream_is_not_copied():
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="not copied or pickled"):
            duplicate(KeyStream(jax.random.key(0)))


def test_repr_says_how_many_keys_were_taken():
    stream = KeyStream(jax.random.key(0))
    stream.next_key()
    assert repr(stream) == "<KeyStream of a key<fry> key, 1 taken>"
    shown = []
    jax.jit(lambda key: shown.append(repr(KeyStream(key))))(jax.random.key(0))
    assert shown == ["<KeyStream of a traced key, 0 taken>"]


# The current stream


def test_the_innermost_stream_is_used_and_the_outer_one_goes_on_after_it():
    with set_keystream_on_enter(KeyStream(jax.random.key(0))) as outer:
        assert_same_key(get_next_key(), cx_key(0))
        with set_keystream_on_enter(KeyStream(jax.random.key(1))):
            assert_same_key(get_next_key(), jax.random.fold_in(jax.random.key(1), 0))
        assert_same_key(get_next_key(), cx_key(1))
    assert outer.counter == 2


def test_a_bare_key_is_no_stream():
    with pytest.raises(TypeError, match=r"KeyStream\(key\)"):
        set_keystream_on_enter(jax.random.key(0))


def test_vmap_and_grad_draw_from_the_stream_outside():
    with set_keystream_on_enter(KeyStream(jax.random.key(0))) as stream:
        noisy = jax.vmap(jax.grad(lambda x: x * cx.normal()))(jnp.ones(2))
    expected = jax.random.normal(cx_key(0))
    np.testing.assert_allclose(noisy, [expected, expected])
    assert stream.counter == 1


def test_behind_jit_the_message_shows_plumb_rng_key_and_jit():
    def noisy(x):
        return x + cx.normal()

    with set_keystream_on_enter(KeyStream(jax.random.key(0))) as stream:
        with pytest.raises(BehindBoundaryError, match="jit of noisy at") as info:
            jax.jit(noisy)(1.0)
        assert stream.counter == 0
    assert "plumb_rng_key_and_jit(function_that_draws)" in str(info.value)
    assert "set_keystream_on_enter(KeyStream(key))" in str(info.value)


# The default stream


def test_programs_without_keys_draw_from_the_default_stream():
    assert_same_key(get_next_key(), cx_key(0))
    np.testing.assert_array_equal(cx.normal(), jax.random.normal(cx_key(1)))


def test_the_default_seed_starts_the_default_stream_anew():
    cx.set_default_seed(7)
    first = get_next_key()
    assert_same_key(first, jax.random.fold_in(jax.random.key(7), 0))
    get_next_key()
    cx.set_default_seed(np.int64(7))
    assert_same_key(get_next_key(), first)
    for seed in (1.5, True, None):
        with pytest.raises(TypeError, match="A seed is an integer"):
            cx.set_default_seed(seed)


def test_the_default_stream_is_refused_behind_jit():
    with pytest.raises(BehindBoundaryError, match="its default counts as set outside") as info:
        jax.jit(cx.normal)()
    assert "plumb_rng_key_and_jit" in str(info.value)
    assert_same_key(get_next_key(), cx_key(0))


def test_the_default_stream_made_under_vmap_survives_it():
    result = jax.vmap(lambda x: x + cx.normal())(jnp.zeros(2))
    expected = jax.random.normal(cx_key(0))
    np.testing.assert_allclose(result, [expected, expected])
    assert_same_key(get_next_key(), cx_key(1))


def test_a_stream_that_is_set_hides_the_default_one():
    with set_keystream_on_enter(KeyStream(jax.random.key(5))):
        assert_same_key(get_next_key(), jax.random.fold_in(jax.random.key(5), 0))
    assert_same_key(get_next_key(), cx_key(0))


def test_importing_and_seeding_do_not_start_the_backend():
    program = (
        "import jax\n"
        "from anabranch import contextvars_ext as cx\n"
        "cx.set_default_seed(3)\n"
        "cx.JitAwareContextVar(default_factory=lambda: jax.random.key(0))\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "cx.get_next_key()\n"
        "assert xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# Samplers

ARGUMENTS = {
    "normal": ((3,), {}),
    "uniform": ((), {"shape": (3,), "minval": 2.0, "maxval": 3.0}),
    "bernoulli": ((0.3, (5,)), {}),
    "categorical": ((np.log([[0.2, 0.8]] * 3),), {"axis": -1}),
    "randint": (((4,), 0, 10), {}),
    "permutation": ((5,), {}),
    "truncated_normal": ((-1.0, 1.0, (3,)), {}),
    "choice": ((10, (3,)), {"replace": False}),
    "gamma": ((2.0,), {"shape": (3,)}),
    "multivariate_normal": ((np.zeros(2, np.float32), np.eye(2, dtype=np.float32)), {}),
    "orthogonal": ((2,), {}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_sampler_is_its_namesake_with_the_next_key(name):
    args, kwargs = ARGUMENTS[name]
    with set_keystream_on_enter(KeyStream(jax.random.key(0))) as stream:
        draws = [getattr(cx, name)(*args, **kwargs) for _ in range(2)]
    for n, draw in enumerate(draws):
        np.testing.assert_array_equal(draw, getattr(jax.random, name)(cx_key(n), *args, **kwargs))
    assert stream.counter == 2


@pytest.mark.parametrize("name", cx.random.__all__)
def test_the_signature_is_that_of_the_namesake_without_its_key(name):
    theirs = inspect.signature(getattr(jax.random, name)).parameters
    ours = inspect.signature(getattr(cx.random, name)).parameters
    assert next(iter(theirs)) == "key"
    assert list(theirs.values())[1:] == list(ours.values())
    assert getattr(cx.random, name).__name__ == name


def test_every_sampler_of_jax_is_there():
    not_samplers = {
        "PRNGKey", "clone", "fold_in", "key", "key_data", "key_dtype", "key_impl", "split",
        "wrap_key_data", "Key",
    }  # fmt: skip
    public = {
        name
        for name in dir(jax.random)
        if callable(getattr(jax.random, name)) and not name.startswith("_")
    }
    assert public - not_samplers <= set(cx.random.__all__)


def test_a_wrong_argument_is_reported_by_jax():
    wrong = pytest.raises(TypeError, match="no_such_argument")
    with set_keystream_on_enter(KeyStream(jax.random.key(0))), wrong:
        cx.normal(no_such_argument=1)


# plumb_rng_key_and_jit


def test_a_compiled_function_draws_afresh_on_every_call_with_one_trace():
    traces = []

    @cx.plumb_rng_key_and_jit
    def noisy(x):
        traces.append(1)
        return x + cx.normal()

    with set_keystream_on_enter(KeyStream(jax.random.key(0))):
        draws = [float(noisy(0.0)) for _ in range(3)]
    expected = [float(jax.random.normal(jax.random.fold_in(cx_key(n), 0))) for n in range(3)]
    np.testing.assert_allclose(draws, expected, rtol=1e-6)
    assert len(traces) == 1


def test_it_nests_with_one_more_level_of_keys_each():
    inner = cx.plumb_rng_key_and_jit(get_next_key)
    outer = cx.plumb_rng_key_and_jit(lambda: (get_next_key(), inner()))
    with set_keystream_on_enter(KeyStream(jax.random.key(0))):
        first, second = outer()
    root = cx_key(0)
    assert_same_key(first, jax.random.fold_in(root, 0))
    assert_same_key(second, jax.random.fold_in(jax.random.fold_in(root, 1), 0))


def test_it_draws_from_the_default_stream_too():
    noisy = cx.plumb_rng_key_and_jit(lambda x: x + cx.normal())
    np.testing.assert_allclose(
        noisy(1.0), 1.0 + jax.random.normal(jax.random.fold_in(cx_key(0), 0)), rtol=1e-6
    )


def test_static_positions_count_the_arguments_of_the_user():
    seen = []

    @cx.plumb_rng_key_and_jit(static_argnums=0)
    def first(n, x):
        seen.append(n)
        return x * n

    @cx.plumb_rng_key_and_jit(static_argnums=(0, -1))
    def both(n, x, m):
        seen.append((n, m))
        return x * n * m

    @cx.plumb_rng_key_and_jit(static_argnames="m")
    def by_name(x, m):
        seen.append(m)
        return x * m

    assert first(3, 2.0) == 6.0
    assert both(3, 2.0, 4) == 24.0
    assert by_name(2.0, 5) == 10.0
    assert seen == [3, (3, 4), 5]


def test_donated_positions_count_the_arguments_of_the_user():
    add = cx.plumb_rng_key_and_jit(lambda x, y: x + y, donate_argnums=(1,))
    x, y = jnp.ones(4), jnp.ones(4)
    np.testing.assert_allclose(add(x, y), 2.0 * np.ones(4))
    assert (x.is_deleted(), y.is_deleted()) == (False, True)


def test_shardings_count_the_arguments_of_the_user():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("i"))
    double = cx.plumb_rng_key_and_jit(lambda x: 2 * x, in_shardings=(sharding,))
    result = double(np.arange(8.0, dtype=np.float32))
    np.testing.assert_allclose(result, 2 * np.arange(8.0))
    assert result.sharding.is_equivalent_to(sharding, 1)
    with pytest.raises(TypeError, match=r"Give in_shardings .* as a tuple"):
        cx.plumb_rng_key_and_jit(lambda x: x, in_shardings=sharding)


def test_it_decorates_methods():
    class Layer:
        @functools.partial(cx.plumb_rng_key_and_jit, static_argnums=0)
        def noisy(self, x):
            return x + cx.normal()

    with set_keystream_on_enter(KeyStream(jax.random.key(0))):
        result = Layer().noisy(1.0)
    np.testing.assert_allclose(
        result, 1.0 + jax.random.normal(jax.random.fold_in(cx_key(0), 0)), rtol=1e-6
    )
