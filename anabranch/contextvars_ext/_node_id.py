"""Identities for stateful nodes: unique across threads and processes, ordered, hashable."""

from __future__ import annotations

import itertools
import os
import uuid
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True, repr=False)
class NodeId:
    """Identify a stateful node.

    Fields:
        number: counts the nodes of a process. It comes first in the order: JAX sorts the keys of a
            dictionary, and the same program should get the same order on every run.
        origin: the process, so that nodes from a pickle do not collide with those made here.

    Example:
        >>> from anabranch import contextvars_ext as cx
        >>> class Node(cx.StatefulNode[int]): ...
        >>> first, second = Node().unique_id, Node().unique_id
        >>> isinstance(first, cx.NodeId), first < second
        (True, True)
    """

    number: int
    origin: str

    def __repr__(self) -> str:
        return f"<node {self.number}>"


_numbers = itertools.count()
_origin = uuid.uuid4().hex


def _renew_origin() -> None:
    global _origin
    _origin = uuid.uuid4().hex


# The children of a fork share the counter, so they must not share the origin.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_origin)


def next_node_id() -> NodeId:
    """Make an id that no other node has; safe to call from several threads."""
    # `next` on itertools.count is one C call: atomic.
    return NodeId(next(_numbers), _origin)
