"""Random streams that several lanes share: refused, split, or shared on purpose.

A stream is a key and a count that one object holds. With `rngs="split"` every lane gets a key of
its own instead, split from the next key of the stream, and a count of zero; if a lane draws, the
count of the caller's stream has advanced by one afterwards, and its key is what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.errors import SharedStreamError, StructureError
from anabranch.graph._counterparts import is_kind
from anabranch.graph._delta import Diff
from anabranch.graph._flatten import namer
from anabranch.graph._graphdef import GraphDef
from anabranch.graph._variable import RngCount, RngKey

Policy: TypeAlias = Literal["split", "share"] | None


class Stream(NamedTuple):
    """A random stream, by its place in a graphdef."""

    key_leaf: int
    count_leaf: int
    key_variable: int  # the entry
    count_variable: int  # the entry


def find_streams(graphdef: GraphDef) -> list[Stream]:
    """Return the streams: objects that hold exactly one `RngKey` and one `RngCount`."""
    entries = graphdef.entries
    found: dict[int, Stream] = {}
    for entry in entries:
        if entry.kind.is_variable or not entry.kind.identity:
            continue
        below = [e for e in entry.edges if type(e) is int and e >= 0]
        keys = [e for e in below if is_kind(entries[e].cls, RngKey)]
        counts = [e for e in below if is_kind(entries[e].cls, RngCount)]
        if len(keys) == len(counts) == 1:
            key, count = entries[keys[0]].edges[0], entries[counts[0]].edges[0]
            if type(key) is int and type(count) is int and key < 0 and count < 0:
                found.setdefault(counts[0], Stream(~key, ~count, keys[0], counts[0]))
    return list(found.values())


def batch_shape(key: Any) -> tuple[int, ...]:
    """Return the shape of an array of keys; a legacy key has one dimension more."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return tuple(key.shape if typed else key.shape[:-1])


def split_key(key: Any, count: Any, lanes: int | tuple[int, ...]) -> Any:
    """Return keys for lanes, split from the next key of a stream, stacked at the front."""
    return jax.random.split(jax.random.fold_in(key, count), lanes)


def check_policy(policy: Any) -> None:
    """Raise `StructureError` for a policy that there is not."""
    if policy not in (None, "split", "share"):
        raise StructureError(f'rngs is "split", "share" or None, not {policy!r}')


class SharedStreams:
    """The streams of a call that are the same in all lanes, and what is done about draws.

    It knows numbers only, no array and no object, so that compiled functions may keep it.

    Arguments:
        graphdef: of the call.
        leaves: of the call.
        is_shared: for each leaf, whether all lanes get the same.
        policy: what is done if a lane draws.
    """

    __slots__ = ("_all", "_is_shared", "policy", "split")

    def __init__(
        self, graphdef: GraphDef, leaves: Sequence[Any], is_shared: Sequence[bool], policy: Policy
    ) -> None:
        self.policy = policy
        self._is_shared = tuple(is_shared)
        self._all = {s.count_variable: s for s in find_streams(graphdef)}
        self.split: list[Stream] = []
        if policy == "split":
            self.split = [
                s
                for s in self._all.values()
                if is_shared[s.key_leaf]
                and is_shared[s.count_leaf]
                and batch_shape(leaves[s.key_leaf]) == np.shape(leaves[s.count_leaf]) == ()
            ]

    def feed(self, leaves: Sequence[Any], lanes: int) -> list[Any]:
        """Return the leaves that go in: stacked keys, zero counts, and then advanced counts."""
        fed = list(leaves)
        for s in self.split:
            key, count = leaves[s.key_leaf], jnp.asarray(leaves[s.count_leaf])
            fed[s.key_leaf] = split_key(key, count, lanes)
            fed[s.count_leaf] = jnp.zeros_like(count)
            fed.append(count + 1)
        return fed

    def settle(self, graphdef: GraphDef, found: Diff, leaves: Sequence[Any]) -> None:
        """Let counts that lanes have written be what they are to be outside.

        Raises:
            SharedStreamError: a lane drew from a shared stream, and nobody said what this means.
        """
        advanced = {s.count_variable: graphdef.num_leaves + i for i, s in enumerate(self.split)}
        for index, entry in found.delta.changed:
            if not is_kind(entry.cls, RngCount):
                continue
            count = graphdef.entries[index].edges[0]
            if type(count) is not int or count >= 0 or not self._is_shared[~count]:
                continue
            stream = self._all.get(index)
            if stream is not None and not self._is_shared[stream.key_leaf]:
                continue  # lanes have their own keys, and count alike
            slot: Any = entry.edges[0]
            if index in advanced and type(slot) is int and slot < 0:
                found.slots[~slot] = leaves[advanced[index]]
            elif self.policy != "share":
                raise SharedStreamError(self._refusal(namer(graphdef)(index)))

    def _refusal(self, name: str) -> str:
        if self.policy == "split":
            return (
                f"{name}: a key was drawn from a random stream that cannot be split for the lanes: "
                "it holds several keys already, or key and count are not held together by one "
                "object among the arguments or in a variable that the function names. Pass the "
                "stream as an argument, give it an axis, or draw outside"
            )
        return (
            f"{name}: a key was drawn from a random stream that is broadcast, so all lanes would "
            "get the same numbers without anybody having asked for it. Say which it is: "
            '`rngs="split"` gives each lane numbers of its own, `rngs="share"` all lanes the same; '
            "or map the stream (`split_rngs`, and axis 0)"
        )
