"""The rules of the optimizer, one function each: a node in, what takes its place out, or None where it does not match.

A rule says what it may change. `NOTHING`: the model reads the same. `ORDER`: only children of a + change places.
`PROMPT`: the model reads something else; such a rule is applied only where it is asked for.

Not taken from spnl, because it would let order go where it matters: a seq that is the first child of a + is spliced
into it; a par of + becomes one +.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count, islice

from pictool.errors import InputError
from pictool.spans.query import (
    JOINS,
    Augment,
    Call,
    Chat,
    Cross,
    Fragment,
    Generate,
    Join,
    Map,
    Message,
    Monad,
    Par,
    Path,
    Plus,
    Query,
    Repeat,
    Retrieve,
    Seq,
    nodes,
)
from pictool.spans.reading import MAX_NODES, to_json


class Effect(Enum):
    """What a rule may change."""

    NOTHING = "what the model reads stays the same"
    ORDER = "children of a + change places"
    PROMPT = "the model reads another prompt"


@dataclass(frozen=True)
class Options:
    """What the optimizer may do.

    Fields:
        sorts_plus: children of a + are put in the order of their content; that decides what a prefix cache hits, and
            changes answers.
        arity: judges of more children of a + than this become a tree of such judges; None: none do.
        retrieve: finds the fragments of an R. R stays where it gives None, or is None.
    """

    sorts_plus: bool = False
    arity: int | None = None
    retrieve: Callable[[Retrieve | Augment], Sequence[Fragment] | None] | None = None


@dataclass(frozen=True)
class Site:
    """Where a rule is tried. `call` is that of the nearest G around the node."""

    options: Options
    call: Call | None = None


@dataclass(frozen=True)
class Rule:
    """A rule with its name, where it is from, and what it may change."""

    name: str
    source: str
    effect: Effect
    apply: Callable[[Query, Site], Query | None]


def desugar_chat(node: Query, site: Site) -> Query | None:
    """C → G(⋈ …)."""
    if not isinstance(node, Chat):
        return None
    parts = node.input.parts if isinstance(node.input, Seq | Cross) else (node.input,)
    return Generate(Cross(parts), node.call, origin=node.origin)


def desugar_retrieval(node: Query, site: Site) -> Query | None:
    """R → + of its fragments, after each has been prepared by a G¹ of its own."""
    if not isinstance(node, Retrieve | Augment) or site.options.retrieve is None:
        return None
    found = site.options.retrieve(node)
    if found is None:
        return None
    fragments = Plus(tuple(found))
    if site.call is None or not fragments.parts:
        return fragments
    call = replace(site.call, max_tokens=1, temperature=0.0)
    prepared = Plus(tuple(Generate(fragment, call) for fragment in fragments.parts))
    return Seq((Monad(prepared), fragments))


def flatten_plus(node: Query, site: Site) -> Query | None:
    """+(… +(…) …) → +(… …)."""
    return _splice(node, lambda index, part: isinstance(part, Plus)) if isinstance(node, Plus) else None


def flatten_seq(node: Query, site: Site) -> Query | None:
    """A seq in a seq, and a seq in a ⋈ but at its end, before which a serialised query has a marker."""
    if isinstance(node, Seq):
        return _splice(node, lambda index, part: isinstance(part, Seq))
    if isinstance(node, Cross):
        return _splice(node, lambda index, part: isinstance(part, Seq) and index < len(node.parts) - 1)
    return None


def flatten_cross(node: Query, site: Site) -> Query | None:
    """⋈(… ⋈(…)) → ⋈(… …), at its end."""
    if not isinstance(node, Cross):
        return None
    return _splice(node, lambda index, part: isinstance(part, Cross) and index == len(node.parts) - 1)


def unwrap_single(node: Query, site: Site) -> Query | None:
    """A seq or par of one is that one."""
    return node.parts[0] if isinstance(node, Seq | Par) and len(node.parts) == 1 else None


def drop_empty(node: Query, site: Site) -> Query | None:
    """Messages without text and joins without children leave a join."""
    if not isinstance(node, Join):
        return None
    kept = tuple(part for part in node.parts if not _is_empty(part))
    return node.with_children(kept) if len(kept) < len(node.parts) else None


def order_plus(node: Query, site: Site) -> Query | None:
    """Children of a + in the order of their content, so that equal sets of them are equal prefixes."""
    if not isinstance(node, Plus) or not site.options.sorts_plus:
        return None
    parts = tuple(sorted(node.parts, key=to_json))
    return Plus(parts) if parts != node.parts else None


def reduce_by_tree(node: Query, site: Site) -> Query | None:
    """A G over a + of many candidates becomes a tree of such G of at most `arity` candidates (§6, fig. 16).

    Candidates are the outputs of calls; every judge reads what else is in the +, as pages. Of a + without calls all
    children are candidates. Each judge draws its own: it has an origin of its own.
    """
    arity = site.options.arity
    if arity is None or not isinstance(node, Generate):
        return None
    parts = node.input.parts if isinstance(node.input, Seq | Cross) else (node.input,)
    joins = [index for index, part in enumerate(parts) if isinstance(part, Plus)]
    at, *others = [index for index in joins if has_calls(parts[index])] or joins or [-1]
    if at < 0 or others:
        return None
    children = [output for child in parts[at].children for output in _outputs(child)]
    calls = [child for child in children if has_calls(child)]
    candidates, pages = (calls, [child for child in children if not has_calls(child)]) if calls else (children, [])
    if len(candidates) <= arity:
        return None
    numbers = count()

    def judge(group: Sequence[Query], *number: int) -> Query:
        step: Path = ("judge", *number) if number else ()
        origin = None if node.origin is None else node.origin + step
        over: Query = Plus((*pages, *group))
        if isinstance(node.input, Seq | Cross):
            over = node.input.with_children([*parts[:at], over, *parts[at + 1 :]])
        return replace(node, input=over, origin=origin)

    while len(candidates) > arity:
        groups = [candidates[start : start + arity] for start in range(0, len(candidates), arity)]
        candidates = [group[0] if len(group) == 1 else judge(group, next(numbers)) for group in groups]
    tree = judge(candidates)
    if sum(1 for _ in islice(nodes(tree), MAX_NODES + 1)) > MAX_NODES:
        raise InputError(
            f"as a tree of judges of {arity} the query has more than {MAX_NODES} nodes; judge more at once"
        )
    return tree


SIMPLIFICATIONS = (
    Rule("drop empty", "spnl", Effect.NOTHING, drop_empty),
    Rule("unwrap single", "spnl", Effect.NOTHING, unwrap_single),
    Rule("flatten seq", "spnl", Effect.NOTHING, flatten_seq),
    Rule("flatten ⋈", "spnl", Effect.NOTHING, flatten_cross),
    Rule("flatten +", "Span queries fig. 7c", Effect.NOTHING, flatten_plus),
)
RULES = (
    Rule("desugar C", "Span queries fig. 7a", Effect.NOTHING, desugar_chat),
    Rule("desugar R", "Span queries fig. 7b", Effect.NOTHING, desugar_retrieval),
    *SIMPLIFICATIONS,
    Rule("reduce by tree", "Span queries §6", Effect.PROMPT, reduce_by_tree),
    Rule("order +", "ours", Effect.ORDER, order_plus),
)


def has_calls(query: Query) -> bool:
    """Whether a model generates anything in it."""
    return any(isinstance(node, Generate | Chat | Map) for _, node in nodes(query))


def needs_running(query: Query) -> bool:
    """Whether it is anything but messages and joins of them."""
    return any(not isinstance(node, Message | Join) for _, node in nodes(query))


def _outputs(child: Query) -> list[Query]:
    """A child of a + as what it gives there: a repeat, a map or a par is as many children.

    A repeat whose input varies stays one: each output's call would draw its input anew.
    """
    match child:
        case Plus(parts) | Par(parts):
            return [output for part in parts for output in _outputs(part)]
        case Repeat() if not child.input.input.varies:
            return [
                call if call.origin is None else replace(call, origin=(*call.origin, index))
                for index, call in enumerate([child.input] * child.n)
            ]
        case Map():
            return list(child.calls())
    return [child]


def _splice(node: Join, matches: Callable[[int, Query], bool]) -> Query | None:
    """The node with the children of those children that match; None if none does."""
    flags = [matches(index, part) for index, part in enumerate(node.parts)]
    if not any(flags):
        return None
    spliced: list[Query] = []
    for part, is_spliced in zip(node.parts, flags, strict=True):
        spliced.extend(part.children if is_spliced else (part,))
    return node.with_children(spliced)


def _is_empty(query: Query) -> bool:
    if isinstance(query, Message):
        return not query.text
    return isinstance(query, JOINS) and not query.children
