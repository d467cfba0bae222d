"""Lays out many requests in rows so that their common prefixes are computed once.

Requests that begin with the same tokens share the hidden states of these tokens, in two ways:

- A subtree of few tokens is laid out as one `Layout`. It contains each common prefix once, and a
  mask lets every token attend to its ancestors only.
- A prefix that many requests share, such as the examples of a prompt, is a `PrefixGroup`. The keys
  and values of the prefix are computed once, and the layouts of all requests continue them.
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from ...decoding.padding import common_prefix

SHORTEST_PREFIX = 32
"""Minimum length of a common prefix whose keys and values are computed by a separate call."""
PREFIX_CALL = 64
"""The overhead of a call that computes only a prefix, as an equivalent number of tokens."""


class Request(NamedTuple):
    """The tokens that a model reads, and the labels that are scored.

    `labels[-1]` follows the last token of `inputs`, `labels[-2]` follows the second to last token,
    and so on.
    """

    inputs: tuple[int, ...]
    labels: tuple[int, ...]
    number: int
    """The index of the request in the caller's list."""

    @property
    def first(self) -> int:
        """The index in `inputs` of the token that precedes the first label."""
        return len(self.inputs) - len(self.labels)


class Scored(NamedTuple):
    """A label, and the position in a layout of the token that precedes it."""

    at: int
    """The index of the preceding token in the layout."""
    label: int
    request: int
    offset: int
    """The index of the label in its request."""


@dataclasses.dataclass
class Layout:
    """The tokens of one or several requests, in the order of a depth-first traversal of their tree.

    Token i attends to token j if j ≤ i ≤ `last[j]`.
    """

    ids: list[int] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    last: list[int] = dataclasses.field(default_factory=list)
    """The index of the last descendant of each token, or of the token itself if it has none."""
    scored: list[Scored] = dataclasses.field(default_factory=list)

    def append(self, requests: Iterable[Request], base: int = 0) -> None:
        """Appends the tokens of requests, except for their first `base` tokens.

        Args:
            requests: sorted by their inputs, so that common prefixes are adjacent.
            base: the length of the prefix that all requests share. The layout does not contain this
              prefix.
        """
        before: tuple[int, ...] = ()
        path: list[int] = []  # the index in the layout of each token of `before[base:]`
        for inputs, labels, number in requests:
            common = max(common_prefix(before, inputs), base)
            # Tokens that this request does not share have no later descendants.
            self._close(path[common - base :])
            del path[common - base :]
            new = inputs[common:]
            path += range(len(self.ids), len(self.ids) + len(new))
            self.ids += new
            self.positions += range(common, len(inputs))
            self.last += [-1] * len(new)
            first = len(inputs) - len(labels) - base
            self.scored += [
                Scored(path[first + offset], label, number, offset)
                for offset, label in enumerate(labels)
            ]
            before = inputs
        self._close(path)

    def _close(self, indices: Sequence[int]) -> None:
        """Stores the newest token as the last descendant of the tokens with these indices."""
        for index in indices:
            self.last[index] = len(self.ids) - 1


@dataclasses.dataclass(frozen=True)
class Item:
    """Requests that are placed next to each other in one layout, sorted by their inputs."""

    requests: tuple[Request, ...]
    size: int
    """The number of tokens in the layout of these requests."""


@dataclasses.dataclass(frozen=True)
class PrefixGroup:
    """Items that continue a common prefix."""

    prefix: tuple[int, ...]
    items: list[Item]


@dataclasses.dataclass(frozen=True)
class Plan:
    """All requests, divided into groups with a separately computed prefix and other items."""

    groups: list[PrefixGroup]
    items: list[Item]

    @property
    def num_tokens(self) -> int:
        """The number of tokens to compute in all prefixes and in the layouts of all items."""
        in_groups = sum(len(g.prefix) + sum(item.size for item in g.items) for g in self.groups)
        return in_groups + sum(item.size for item in self.items)


@dataclasses.dataclass
class _Node:
    """A common prefix of several requests, or a leaf that contains requests with equal inputs."""

    depth: int
    """The length of the prefix."""
    requests: list[Request] = dataclasses.field(default_factory=list)
    """The requests whose inputs equal the prefix. Only a leaf has such requests."""
    children: "list[_Node]" = dataclasses.field(default_factory=list)
    total: int = 0
    """The number of tokens of the subtree, including the prefix."""
    unscored: int = 0
    """The number of tokens before the first scored token of the subtree."""
    cost: int = 0
    """The number of tokens to compute if the subtree is computed in the cheapest way."""
    way: Literal["pieces", "prefix", "children"] = "pieces"
    """The cheapest way to compute the subtree: in pieces up to the capacity, after a separately
    computed prefix, or child by child.
    """

    @property
    def prefix(self) -> int:
        """The length of the prefix that can be computed separately. No token in it is scored."""
        return min(self.depth, self.unscored)

    def leaves(self) -> "Iterator[_Node]":
        """Yields the leaves below this node, in the order of their requests."""
        return self.pieces(0, -1)

    def pieces(self, base: int, capacity: int) -> "Iterator[_Node]":
        """Yields the largest subtrees with at most `capacity` tokens after the first `base` tokens.

        A leaf may be larger.
        """
        # Do not use recursion, because a chain of prefixes may be long.
        waiting: list[_Node] = [self]
        while waiting:
            node = waiting.pop()
            if node.total - base <= capacity or not node.children:
                yield node
            else:
                waiting += reversed(node.children)

    def items(self, base: int, capacity: int) -> list[Item]:
        """Returns the pieces as items, without their first `base` tokens."""
        return [
            Item(tuple(r for leaf in piece.leaves() for r in leaf.requests), piece.total - base)
            for piece in self.pieces(base, capacity)
        ]

    def close(self, capacity: int) -> None:
        """Computes the token counts and the cheapest way, once all children are closed."""
        self.total = self.depth + sum(child.total - self.depth for child in self.children)
        self.unscored = min(
            [*(child.unscored for child in self.children), *(r.first for r in self.requests)]
        )
        self.cost = sum(piece.total for piece in self.pieces(0, capacity))
        if self.total <= capacity or not self.children:
            return
        # Compare the costs of the three ways.
        prefix, separate = self.prefix, sum(child.cost for child in self.children)
        after = sum(piece.total - prefix for piece in self.pieces(prefix, capacity))
        together = prefix + PREFIX_CALL + after
        if prefix >= SHORTEST_PREFIX and together < min(self.cost, separate):
            self.cost, self.way = together, "prefix"
        elif separate < self.cost:
            self.cost, self.way = separate, "children"


def plan(requests: Sequence[Request], capacity: int, *, share: bool = True) -> Plan:
    """Divides requests into layouts so that few tokens need to be computed.

    Args:
        requests: requests with at least one input and one label each.
        capacity: the maximum number of tokens in a layout of more than one request.
        share: whether common prefixes are computed once.
    """
    if not share:
        return Plan([], [Item((request,), len(request.inputs)) for request in requests])
    # Walk down the tree from the root, and stop at nodes whose subtrees are computed as a whole.
    groups: list[PrefixGroup] = []
    items: list[Item] = []
    waiting = [_tree(sorted(requests), capacity)] if requests else []
    while waiting:
        node = waiting.pop()
        if node.way == "children":
            waiting += node.children
        elif node.way == "prefix":
            inputs = next(node.leaves()).requests[0].inputs
            groups.append(PrefixGroup(inputs[: node.prefix], node.items(node.prefix, capacity)))
        else:
            items += node.items(0, capacity)
    return Plan(groups, items)


def _tree(requests: Sequence[Request], capacity: int) -> _Node:
    """Returns the root of the tree of sorted requests."""
    root = _Node(0)
    nodes, path = [root], [root]  # all nodes, and the nodes from the root to the newest leaf

    def add(node: _Node) -> None:
        path[-1].children.append(node)
        path.append(node)
        nodes.append(node)

    before: tuple[int, ...] = ()
    for inputs, same in itertools.groupby(requests, key=lambda request: request.inputs):
        common, before = common_prefix(before, inputs), inputs
        # Leave the newest leaf and the nodes with a prefix that these requests do not share.
        while path[-1].depth > common or path[-1].requests:
            path.pop()
        # A node for the common prefix replaces the newest child and becomes its parent.
        if path[-1].depth < common:
            add(_Node(common, children=[path[-1].children.pop()]))
        add(_Node(len(inputs), [*same]))
    # Close the children first: they are deeper, or leaves of the same depth.
    for node in sorted(nodes, key=lambda node: (node.depth, bool(node.requests)), reverse=True):
        node.close(capacity)
    return root


def pack(
    sizes: Sequence[tuple[int, ...]], capacity: tuple[int, ...], most: int | None = None
) -> list[list[int]]:
    """Packs items into few bins: the largest item first, each into the first bin with space.

    Args:
        sizes: the sizes of each item, one size for each dimension of a bin.
        capacity: the sizes of a bin. A larger item gets a separate bin.
        most: the maximum number of bins; items that do not fit are left out. If None, all items are
          packed.

    Returns:
        The indices of the items of each bin.
    """
    # First fit, decreasing.
    bins: list[list[int]] = []
    space: list[list[int]] = []
    smallest = list(map(min, zip(*sizes, strict=True)))

    def fits(needed: Sequence[int], free: Sequence[int]) -> bool:
        return all(map(operator.le, needed, free))

    for i in sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True):
        chosen = next((k for k, free in enumerate(space) if fits(sizes[i], free)), len(bins))
        if chosen == most:
            # Stop early if no item fits into any bin.
            if not any(fits(smallest, free) for free in space):
                break
            continue
        if chosen == len(bins):
            bins.append([])
            space.append(list(capacity))
        bins[chosen].append(i)
        space[chosen] = list(map(operator.sub, space[chosen], sizes[i]))
    return bins
