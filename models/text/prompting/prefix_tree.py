"""Lays out many requests in rows so that their common prefixes are computed once.

Requests that begin with the same tokens share the hidden states of these tokens, in two ways:

- A subtree of few tokens is one `Layout`: it contains each common prefix once, and a mask lets
  every token attend to its ancestors only.
- A prefix of many requests, such as the examples of a prompt, is a `PrefixGroup`: its keys and
  values are computed once, and the layouts of all requests continue them.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

SHORTEST_PREFIX = 32
"""Minimum length of a common prefix whose keys and values get a separate call."""
PREFIX_CALL = 64
"""The overhead of a call that computes only a prefix, in tokens."""


class Request(NamedTuple):
    """The tokens that a model reads, and the tokens that it is asked for.

    `labels[-1]` follows the last of `inputs`, `labels[-2]` the one before it, and so on.
    """

    inputs: tuple[int, ...]
    labels: tuple[int, ...]
    number: int
    """The index of the request in the caller's list."""

    @property
    def first(self) -> int:
        """The index of the input that the first label follows."""
        return len(self.inputs) - len(self.labels)


class Scored(NamedTuple):
    """A label, and the token of a layout that it follows."""

    at: int
    """The index of the token in the layout."""
    label: int
    request: int
    place: int
    """The index of the label in its request."""


@dataclasses.dataclass
class Layout:
    """Tokens of one or several requests, each after its ancestors and before its other siblings.

    Token i attends to token j if j ≤ i ≤ `last[j]`.
    """

    ids: list[int] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    last: list[int] = dataclasses.field(default_factory=list)
    """The index of the token's last descendant, or of the token itself."""
    scored: list[Scored] = dataclasses.field(default_factory=list)

    def append(self, requests: Iterable[Request], base: int = 0) -> None:
        """Lays out requests behind those that are there, without their first `base` tokens.

        Args:
            requests: sorted by their inputs, so that common prefixes are adjacent.
            base: the number of tokens of a prefix that all requests share and that is left out.
        """
        before: tuple[int, ...] = ()
        path: list[int] = []  # the index of each token of `before` behind the prefix
        for inputs, labels, number in requests:
            common = max(common_prefix(before, inputs), base) if before else base
            self._close(path[common - base :])
            del path[common - base :]
            for position in range(common, len(inputs)):
                path.append(len(self.ids))
                self.ids.append(inputs[position])
                self.positions.append(position)
                self.last.append(-1)
            first = len(inputs) - len(labels) - base
            self.scored += [
                Scored(path[first + place], label, number, place)
                for place, label in enumerate(labels)
            ]
            before = inputs
        self._close(path)

    def _close(self, indices: Sequence[int]) -> None:
        """Ends the subtrees of some tokens at the last token that is there."""
        for index in indices:
            self.last[index] = len(self.ids) - 1


@dataclasses.dataclass(frozen=True)
class Item:
    """Requests that are laid out side by side, sorted by their inputs."""

    requests: tuple[Request, ...]
    size: int
    """The number of tokens of their layout."""


@dataclasses.dataclass(frozen=True)
class PrefixGroup:
    """Items that continue a common prefix."""

    prefix: tuple[int, ...]
    items: list[Item]


@dataclasses.dataclass(frozen=True)
class Plan:
    """All requests, divided into those that continue a computed prefix and the others."""

    groups: list[PrefixGroup]
    items: list[Item]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all prefixes and layouts."""
        in_groups = sum(len(g.prefix) + sum(item.size for item in g.items) for g in self.groups)
        return in_groups + sum(item.size for item in self.items)


@dataclasses.dataclass
class _Node:
    """A prefix of several requests, or all inputs of some."""

    depth: int
    """The length of the prefix."""
    children: "list[_Node]" = dataclasses.field(default_factory=list)
    requests: list[Request] = dataclasses.field(default_factory=list)
    """Requests whose inputs are the prefix; only a leaf has some."""
    total: int = 0
    """The number of tokens of the subtree, including the prefix."""
    unscored: int = 0
    """The number of leading tokens before the first scored one of the subtree."""


def plan(requests: Sequence[Request], capacity: int, *, share: bool = True) -> Plan:
    """Divides requests into layouts so that few tokens are computed.

    Args:
        requests: at least one input and one label each.
        capacity: the largest layout of more than one request, in tokens.
        share: whether common prefixes are computed once.
    """
    if not share:
        return Plan([], [Item((request,), len(request.inputs)) for request in requests])
    if not requests:
        return Plan([], [])
    nodes = _tree(sorted(requests))
    costs: dict[int, int] = {}
    own: set[int] = set()
    split: set[int] = set()
    for node in nodes:  # children come before their parents
        pooled = costs[id(node)] = sum(n.total for n in _pieces(node, 0, capacity))
        if node.total <= capacity or not node.children:
            continue
        apart = sum(costs[id(child)] for child in node.children)
        prefix = min(node.depth, node.unscored)
        together = (
            prefix + PREFIX_CALL + sum(n.total - prefix for n in _pieces(node, prefix, capacity))
        )
        if prefix >= SHORTEST_PREFIX and together < min(pooled, apart):
            costs[id(node)] = together
            own.add(id(node))
        elif apart < pooled:
            costs[id(node)] = apart
            split.add(id(node))
    groups, items = [], []
    waiting = nodes[-1:]
    while waiting:
        node = waiting.pop()
        if id(node) in split:
            waiting += node.children
        elif id(node) in own:
            prefix = min(node.depth, node.unscored)
            inputs = next(_requests(node)).inputs
            found = [_item(piece, prefix) for piece in _pieces(node, prefix, capacity)]
            groups.append(PrefixGroup(inputs[:prefix], found))
        else:
            items += [_item(piece, 0) for piece in _pieces(node, 0, capacity)]
    return Plan(groups, items)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the number of tokens that two sequences begin with alike."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    low, high = 0, length  # they are alike up to `low`, and not up to `high`
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _tree(requests: Sequence[Request]) -> list[_Node]:
    """Returns the nodes of the tree of sorted requests, children first and the root last."""
    done: list[_Node] = []
    path = [_Node(0)]  # from the root to the newest leaf
    before: tuple[int, ...] | None = None

    def close(node: _Node) -> _Node:
        depth, children = node.depth, node.children
        node.total = depth + sum(child.total - depth for child in children)
        node.unscored = min(
            [*(child.unscored for child in children), *(r.first for r in node.requests)]
        )
        done.append(node)
        return node

    for request in requests:
        if request.inputs == before:
            path[-1].requests.append(request)
            continue
        common = 0 if before is None else common_prefix(before, request.inputs)
        closed: _Node | None = None
        while path[-1].depth > common:
            node = path.pop()
            if closed is not None:
                node.children.append(closed)
            closed = close(node)
        if path[-1].requests:  # a leaf that the new request continues
            closed = close(path.pop())
        if path[-1].depth < common:
            path.append(_Node(common))
        if closed is not None:
            path[-1].children.append(closed)
        path.append(_Node(len(request.inputs), requests=[request]))
        before = request.inputs
    closed = None
    while path:
        node = path.pop()
        if closed is not None:
            node.children.append(closed)
        closed = close(node)
    return done


def _pieces(node: _Node, base: int, capacity: int) -> "Iterator[_Node]":
    """Yields the largest subtrees that have at most `capacity` tokens behind `base`, and leaves."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node.total - base <= capacity or not node.children:
            yield node
        else:
            waiting += reversed(node.children)


def _requests(node: _Node) -> Iterator[Request]:
    """Yields the requests of a subtree in their order."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield from node.requests
        waiting += reversed(node.children)


def _item(node: _Node, base: int) -> Item:
    return Item(tuple(_requests(node)), node.total - base)


def pack(
    sizes: Sequence[tuple[int, ...]], capacity: tuple[int, ...], most: int | None = None
) -> list[list[int]]:
    """Packs items into few bins: each into the first with enough space, the largest first.

    Args:
        sizes: the sizes of each item, one for each dimension of a bin.
        capacity: the sizes of a bin; a larger item gets a separate bin.
        most: the number of bins; items beyond it are left out. None: as many as are needed.

    Returns:
        The numbers of the items of each bin.
    """
    bins: list[list[int]] = []
    space: list[list[int]] = []
    smallest = min(sizes, default=(0,))[0]
    for number in sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True):
        needed = sizes[number]
        fits = (
            i
            for i, left in enumerate(space)
            if all(n <= free for n, free in zip(needed, left, strict=True))
        )
        chosen = next(fits, None)
        if chosen is None and len(bins) == most:
            if all(left[0] < smallest for left in space):
                break  # nothing that is left fits
            continue
        if chosen is None:
            chosen = len(bins)
            bins.append([])
            space.append(list(capacity))
        bins[chosen].append(number)
        space[chosen] = [free - n for n, free in zip(needed, space[chosen], strict=True)]
    return bins
