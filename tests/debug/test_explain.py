"""One line for what made a compiled function trace again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import anabranch as ab


class Layer(ab.Module):
    def __init__(self, number: int) -> None:
        self.w = ab.Param(jnp.ones(3), role="weight")
        self.rate = 0.1
        self.number = number


class Model(ab.Module):
    def __init__(self, layers: int = 10) -> None:
        self.layers = [Layer(number) for number in range(layers)]

    def __call__(self, x):
        for layer in self.layers:
            x = x * layer.w * layer.rate
        return x

    @ab.jit
    def step(self, x):
        return self(x)


def traced_again(function, model, change, x=1.0):
    """Call, change the model, call again, and ask why it was traced the second time."""
    function(model, x)
    change(model)
    function(model, x)
    return ab.debug.explain_retrace(function)


def call(model, x):
    return model(x)


def test_one_changed_attribute_among_ten_layers_is_one_line():
    """C25."""

    def change(model):
        model.layers[7].rate = 0.25

    text = traced_again(ab.jit(call), Model(), change)
    assert text == "args[0]['layers'][7]['rate']: was 0.1, is 0.25"


def test_a_number_of_another_type_is_told():
    def change(model):
        model.layers[3].number = True

    model = Model()
    model.layers[3].number = 1
    assert traced_again(ab.jit(call), model, change) == (
        "args[0]['layers'][3]['number']: was 1, is True"
    )


def test_what_is_added_and_removed_is_told():
    def change(model):
        model.layers[2].extra = "new"
        del model.layers[4].number

    assert traced_again(ab.jit(call), Model(), change).splitlines() == [
        "args[0]['layers'][2]['extra']: was <absent>, is 'new'",
        "args[0]['layers'][4]['number']: was 4, is <absent>",
    ]


def test_a_longer_list_and_other_metadata_are_told():
    def append(model):
        model.layers.append(Layer(10))

    def relabel(model):
        model.layers[0].w.set_metadata(role="bias")

    function = ab.jit(call)
    text = traced_again(function, Model(), append)
    assert text == "args[0]['layers'][10]: was <absent>, is Layer(w, rate, number)"
    text = traced_again(ab.jit(call), Model(), relabel)
    assert text == (
        "args[0]['layers'][0]['w']: was Param with metadata {'role': 'weight'}, "
        "is Param with metadata {'role': 'bias'}"
    )


def test_a_new_alias_is_told():
    def tie(model):
        model.layers[1].w = model.layers[0].w

    text = traced_again(ab.jit(call), Model(), tie)
    assert text.startswith("args[0]['layers'][1]['w']: was ")
    assert "alias" in text


def test_shapes_and_weak_types_are_told():
    function, model = ab.jit(call), Model()
    function(model, jnp.ones(3))
    function(model, jnp.ones((2, 3)))
    assert ab.debug.explain_retrace(function) == "args[1]: was float32[3], is float32[2,3]"
    function(model, 1.0)
    function(model, jnp.float32(1.0))
    assert ab.debug.explain_retrace(function) == (
        "args[1]: was float32[] (weakly typed), is float32[]"
    )


def test_the_last_trace_is_compared_with_the_one_most_like_it():
    function = ab.jit(lambda model, mode: model(1.0))
    model, other = Model(), Model(3)
    function(model, "a")
    function(other, "a")
    function(model, "b")
    assert ab.debug.explain_retrace(function) == "args[1]: was 'a', is 'b'"


def test_static_arguments_and_keywords_are_told():
    function = ab.jit(lambda x, *, mode: x, static_argnames="mode")
    function(1.0, mode="a")
    function(1.0, mode="b")
    assert ab.debug.explain_retrace(function) == "kwargs['mode']: was 'a', is 'b'"


def test_methods_can_be_asked():
    model = Model()
    model.step(1.0)
    model.layers[0].rate = 0.5
    model.step(1.0)
    text = "args[0]['layers'][0]['rate']: was 0.1, is 0.5"
    assert text in {ab.debug.explain_retrace(model.step), ab.debug.explain_retrace(Model.step)}


def test_what_cannot_be_explained_is_said():
    function = ab.jit(call)
    assert "not traced yet" in ab.debug.explain_retrace(function)
    function(Model(), 1.0)
    assert "traced once" in ab.debug.explain_retrace(function)
    with jax.numpy_dtype_promotion("strict"):
        function(Model(), jnp.float32(1.0))
    with pytest.raises(ab.errors.ArgumentError, match="not compiled by `jit`"):
        ab.debug.explain_retrace(call)


def test_a_setting_of_jax_is_named_as_a_cause():
    function = ab.jit(lambda x: x * 2)
    function(jnp.float32(1.0))
    with jax.default_matmul_precision("float32"):
        function(jnp.float32(1.0))
    assert "a setting of JAX" in ab.debug.explain_retrace(function)


def test_traces_in_vain_do_not_count():
    class Hidden:  # nobody looks into it, so that the Variable is found by its use
        v = ab.Variable(2.0)

    def use(x):
        if x.shape == (2,):
            raise ValueError("two")
        return x * Hidden.v

    function = ab.jit(use)
    assert float(function(jnp.array(3.0))) == 6.0
    assert "traced once" in ab.debug.explain_retrace(function)
    with pytest.raises(ValueError, match="two"):
        function(jnp.ones(2))
    assert "traced once" in ab.debug.explain_retrace(function)


def test_what_is_captured_is_told():
    model = Model()
    function = ab.jit(lambda x: model(x) * 2)
    function(1.0)
    model.layers[1].rate = 0.5
    function(1.0)
    assert ab.debug.explain_retrace(function) == ("model['layers'][1]['rate']: was 0.1, is 0.5")


def test_graphdefs_can_be_compared():
    model = Model()
    old = ab.graphdef(model)
    assert ab.debug.explain(old, ab.graphdef(Model())) == ""
    model.layers[9].rate = 1
    assert ab.debug.explain(old, ab.graphdef(model)) == "['layers'][9]['rate']: was 0.1, is 1"


def test_the_text_is_short_whatever_the_size_of_the_model():
    model = Model(1_000)
    old = ab.graphdef(model)
    for layer in model.layers:
        layer.rate = "long" * 2_000
        setattr(layer, "long" * 2_000, 1)
    text = ab.debug.explain(old, ab.graphdef(model))
    assert len(text) <= 4_000
    assert len(text.splitlines()) == 6
    assert text.splitlines()[-1].startswith("... and ")


def test_traces_keep_no_model_alive():
    import gc
    import weakref

    function, model = ab.jit(call), Model()
    function(model, 1.0)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(function.recent_traces()) == 1
