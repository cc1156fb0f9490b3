"""The environment that the other tests rely on."""

import jax
from hypothesis import settings


def test_eight_devices():
    assert jax.device_count() == 8


def test_property_tests_are_reproducible():
    assert settings.default is not None
    assert settings.default.derandomize
    assert settings.default.deadline is None
