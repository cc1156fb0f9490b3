"""The ids of what a list holds, read where CPython keeps them, without an int for each."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_char, c_size_t, sizeof
from typing import Any

SIZE = sizeof(c_size_t)
"""The bytes of an address."""
_address_at = c_size_t.from_address
_ELEMENTS = list.__basicsize__ - 2 * SIZE
"""Where in a list the address of the elements is; how many have room comes last."""


def addresses_reader(count: int) -> Callable[[list[Any]], Any]:
    """Return a function from a list of so many elements to the memory that has their addresses.

    It is the memory of the list, to be read before the list changes or dies.
    """
    elements_at = (c_char * (SIZE * count)).from_address

    def read(objects: list[Any]) -> Any:
        return elements_at(_address_at(id(objects) + _ELEMENTS).value)

    return read
