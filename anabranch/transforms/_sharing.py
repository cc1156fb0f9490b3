"""Arguments that hang on a Module which is passed, too, or that are passed twice.

What a function captures counts as an argument here.

`step(model, model.layers)`: the list is read as an argument, and it belongs to what is known of the
Module. It is enough then to see that it is that list. The same holds for what is in two places
among the arguments: the second one is seen to be the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from anabranch.transforms._segment import Segment
from anabranch.transforms._spine import Spine


class Sharing(NamedTuple):
    """Which nodes of a spine are shared; what is below one of them is not listed."""

    attached: list[tuple[int, int, int]]  # a node, a segment, and the index of the object there
    repeated: list[tuple[int, int]]  # a node, and the one that it is
    own: list[int]  # the nodes that are neither, nor below one
    kept: list[int]  # the leaves that are below none of them

    def read(self, spine: Spine, segments: Sequence[Segment]) -> bool:
        """Tell whether the same nodes are shared, and leave those in the spine that are not.

        Which are repeated is a part of the key.
        """
        nodes, leaves = spine.nodes, spine.leaves
        for k, number, index in self.attached:
            if nodes[k] is not segments[number].objects.get(index):
                return False
        spine.nodes = [nodes[k] for k in self.own]
        spine.leaves = [leaves[i] for i in self.kept]
        return True


def find_sharing(spine: Spine, segments: Sequence[Segment]) -> Sharing | None:
    """Return which nodes of a spine are shared, None if there are none."""
    if not spine.nodes:
        return None
    objects = {
        id(obj): (number, index)
        for number, segment in enumerate(segments)
        for index, obj in segment.objects.items()
    }
    sharing = Sharing([], [], [], [])
    first: dict[int, int] = {}
    at = 0  # the leaves before are done
    end = 0  # the nodes before are below one that is shared
    for k, node in enumerate(spine.nodes):
        if k < end:
            continue
        known, place = first.setdefault(id(node), k), objects.get(id(node))
        if known == k and place is None:
            sharing.own.append(k)
            continue
        if place is not None:
            sharing.attached.append((k, *place))
        else:
            sharing.repeated.append((k, known))
        start, stop, end = spine.spans[k]
        sharing.kept.extend(range(at, start))
        at = stop
    sharing.kept.extend(range(at, len(spine.leaves)))
    return sharing if sharing.attached or sharing.repeated else None
