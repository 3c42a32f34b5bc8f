"""What a forbidden access says about its cause."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import TYPE_CHECKING

from fa_verify.diagnosis.tiles import between_rows, tile_of
from fa_verify.pages import NOWHERE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.backends.base import Incident
    from fa_verify.problem import Problem

__all__ = ["NO_PAGE", "explain", "likeliest", "operand", "plain"]

NO_PAGE = "which stands in the block table"
_VAGUE = "no known defect explains it: "  # before what leaves open which of several it is
_SHAPE = re.compile(r"\(shape \((.*?)\), strides")
_TABLES = re.compile(r"cu_|start|begin|indptr|offset|length|seqlen|table|ind(ex|ices)")
_PAGES = (8, 16, 32, 64, 128, 256)  # keys of usual pages
_SAME = ("kind", "kernel", "file", "line", "argument")  # of one place's incidents
_ALIASES = {
    "out": "o",
    "dout": "do",
    "query": "q",
    "key": "k",
    "value": "v",
    "l": "lse",
    "m": "lse",
}

_GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
_ADDED = "by load, add and store"
_SCALES = ("q_scale", "k_scale", "v_scale")
_SENTENCES = {
    "integer-overflow": (
        "an index times a stride needs 64 bits: widen a factor first, with .to(tl.int64), or "
        "declare Capabilities(int64_offsets=False)"
    ),
    "neighbour-read": (
        "{vague}the load of {name} reaches another head's elements, so its mask is missing or does "
        "not stop at the length, or the index of a head is wrong"
    ),
    "uninitialised-read": (
        "{name} is read where nobody has written: it was allocated with torch.empty, or, of a "
        "paged cache, the read goes past the cache's length, to a page of nobody or by a wrong "
        "stride"
    ),
}


def likeliest(wanted: Incident, cases: Sequence[tuple[tuple[Incident, ...], Problem]]) -> str:
    """The clearest that the incidents of one place say over several cases; "" if none is there.

    A tensor of one element does not tell an axis; one of another case does.
    """
    said = [
        explain(incident, others, problem)
        for others, problem in cases
        for incident in others
        if all(getattr(incident, name) == getattr(wanted, name) for name in _SAME)
    ]
    added = [text for text in said if _ADDED in text]
    if added:  # one case with a single write apiece does not speak against it
        return added[0]
    clear = collections.Counter(_kind(text) for text in said if not text.startswith(_VAGUE))
    if clear and 2 * clear.total() >= len(said):
        (most, _), *_ = clear.most_common(1)
        return next(text for text in said if _kind(text) == most)
    return next((text for text in said if text.startswith(_VAGUE)), next(iter(said), ""))


def _kind(text: str) -> str:
    """A sentence but for the numbers of its case."""
    return re.sub(r"\d+", "", text)


def explain(incident: Incident, others: tuple[Incident, ...], problem: Problem) -> str:
    """The likely cause of an incident, in a sentence; "" when its kind says nothing more."""
    name = incident.argument
    if incident.kind.startswith("out-of-bounds"):
        return _follows(incident, others) or _outside(incident, problem)
    if incident.kind == "race":
        if any(o.kind == "out-of-bounds-write" and o.argument == name for o in others):
            return (
                f"the store of {name} is not masked: rows past the end of one head are the next "
                "head's first rows, which two programs then write"
            )
        return (
            f"programs update {name} {_ADDED}: their updates get lost; "
            "use tl.atomic_add, or let one program own each element"
            if _accumulates(incident, others)
            else f"two programs touch the same elements of {name} and at least one writes without "
            "an atomic, so that the result depends on their order: a mask is missing, or a stride, "
            "an offset or the size of a block is wrong"
        )
    if incident.kind == "uninitialised-read":
        return _never_written(incident, others, problem)
    return _SENTENCES.get(incident.kind, "").format(name=name, vague=_VAGUE)


def _never_written(incident: Incident, others: tuple[Incident, ...], problem: Problem) -> str:
    """Inputs are written: k and v that hold what nobody wrote are pages."""
    name, where = operand(incident.argument), incident.coordinates or ()
    if name in ("o", "lse"):
        return f"{incident.argument} is read where the launch before left it unwritten"
    if "atomic" in incident.source or name in _GRADIENTS:
        return (
            f"{incident.argument} is read where nobody has written: what is added to it is added "
            "to torch.empty, which must be zeroed first"
        )
    if name in ("k", "v") and where[1:2] and _ends_at(where[1], problem):
        return (
            f"{incident.argument} is read where nobody has written: in slots past the cache's "
            "length, on its last page"
        )
    alike = {operand(x.argument) for x in others if x.kind == incident.kind}
    if name == "v" and "k" not in alike:
        return (
            f"{incident.argument} is read where nobody has written, though k is not: a stride of "
            "its pages, slots or heads is wrong"
        )
    if name not in ("q", "k", "v", "do"):
        return (
            f"{incident.argument} is read where the launch before left it unwritten: a program, a "
            "split or a row is left out there, it must be zeroed first, or here it is read too far "
            "or by a wrong stride"
        )
    return _SENTENCES[incident.kind].format(name=incident.argument)


def _ends_at(slot: int, problem: Problem) -> bool:
    """Whether a sequence may fill its last page up to this slot."""
    whole = ((problem.seqlen_q, problem.seqlen_k),)
    return any(
        slot > 0
        and keys >= slot
        and any((keys - slot) % size == 0 for size in _PAGES if size > slot)
        for _, keys in problem.mask.documents or whole
    )


def _accumulates(incident: Incident, others: tuple[Incident, ...]) -> bool:
    """Whether a race is between a load and a store, or a line adds to what it loaded."""
    return any(
        "read" in x.detail or "load" in x.source or "+=" in x.source
        for x in (incident, *others)
        if (x.kind, x.kernel, x.argument) == (incident.kind, incident.kernel, incident.argument)
    )


def _follows(incident: Incident, others: tuple[Incident, ...]) -> str:
    """What an earlier fault of the same kernel says of an access outside; "" if there is none."""
    for other in others:
        if other.kind == "integer-overflow" and other.kernel == incident.kernel:
            return f"follows from the integer-overflow at {other.file}:{other.line}"
    if _past_a_table(incident):
        return _of_a_table(incident)
    for other in others:
        if other.kernel == incident.kernel and _past_a_table(other):
            return f"follows at {Path(other.file).name}:{other.line}: {_of_a_table(other)}"
    return ""


def _past_a_table(incident: Incident) -> bool:
    """Whether whole numbers, which lead elsewhere, were read outside their tensor."""
    return incident.kind == "out-of-bounds-read" and bool(_TABLES.search(incident.argument))


def _of_a_table(incident: Incident) -> str:
    shape = _SHAPE.search(incident.detail)
    if shape is not None and "," in shape[1].rstrip(","):
        return (
            f"the load of {incident.argument} reads outside the table: its row is not that of the "
            "sequence, or its entry lies past the sequence's last"
        )
    return (
        f"the load of {incident.argument} reads past its last entry: a program for which there is "
        "no sequence or document does not return early, or the index of one is too large"
    )


def _outside(incident: Incident, problem: Problem) -> str:  # noqa: PLR0911 - a case each
    name, reads = incident.argument, incident.kind.endswith("read")
    verb, instruction = ("reads", "load") if reads else ("writes", "store")
    shape = _shape(name, problem)
    key_like = plain(name) in ("k", "v", "dk", "dv")
    axes = ("batch", "head", "key" if key_like else "row", "column")
    where = incident.coordinates
    tile = tile_of(incident)
    if problem.fp8 and name in _SCALES and reads and not tile:
        return f"{name} is read outside its entries: the index of a block or a head is wrong"
    shown = _SHAPE.search(incident.detail)
    if shown is not None and 0 in [int(n) for n in re.findall(r"\d+", shown[1])]:
        return (
            f"the {instruction} of {name} {verb} a tensor without elements: nothing guards a "
            "length of 0"
        )
    if incident.offset < 0:
        whole = ((problem.seqlen_q, problem.seqlen_k),)
        empty = any(0 in lengths for lengths in (*whole, *problem.mask.documents))
        why = "as a length of 0 less one is" if empty else "or has wrapped in too few bits"
        return (
            f"the {instruction} of {name} {verb} before the tensor's first element: an index is "
            f"negative, {why}"
        )
    unmasked = "no mask" in incident.detail and where is not None
    if unmasked and (tile or between_rows(incident)):
        return (
            f"no boundary handling: the {instruction} of {name} {verb} past the end, without a mask"
        )
    if where is not None and where[:1] == (NOWHERE,):
        return (
            f"the {instruction} of {name} goes to page {NOWHERE}, {NO_PAGE} "
            "past a sequence's last page: the table is read at a wrong entry, or too far"
        )
    if tile:
        return (
            f"no boundary handling: the {instruction} of {name} {verb} on past the end, up to the "
            f"end of a tile; its mask does not stop at {_bounds(tile, name, shape)}"
        )
    if unmasked or shape is None or where is None or len(where) != len(shape):
        return (
            f"{_VAGUE}the {instruction} of {name} {verb} outside the tensor, so its mask, an index "
            "or a stride is wrong"
        )
    for axis in reversed(range(len(shape))):
        if not 0 <= where[axis] < shape[axis]:
            if axis == _outermost(name, problem):
                return (
                    f"{_VAGUE}the {instruction} of {name} {verb} past the tensor's last element, "
                    "so its mask does not stop at the length, or an index or a stride is wrong"
                )
            if axis == 1:
                return (
                    f"the {instruction} of {name} {verb} head {where[1]} of {shape[1]}: the index "
                    "of a head, or the offset made of it, is wrong"
                )
            bound = ("batch", "heads", "seqlen_k" if key_like else "seqlen_q", "head_dim")[axis]
            return (
                f"{_VAGUE}the {instruction} of {name} {verb} {axes[axis]} {where[axis]} of "
                f"{shape[axis]}, so its mask does not stop at {bound}, or an index or a stride is "
                "wrong"
            )
    return (
        f"{_VAGUE}the {instruction} of {name} {verb} where no element lies, so a stride or an "
        "offset is wrong"
    )


def _bounds(tile: tuple[int, ...], name: str, shape: tuple[int, ...] | None) -> str:
    """What a mask must stop at along these axes."""
    if shape is None:
        return "the length"
    rows = "seqlen_k" if plain(name) in ("k", "v", "dk", "dv") else "seqlen_q"
    columns = "head_dim_v" if plain(name) in ("v", "o", "do", "dv") else "head_dim"
    known = {-1: columns, -2: rows} if len(shape) == 4 else {-1: rows}
    return " or ".join(dict.fromkeys(known.get(axis, "the length") for axis in tile))


def _outermost(name: str, problem: Problem) -> int:
    """The axis with the largest stride: past its end lies all that runs over, whatever ran over."""
    layout = getattr(problem, f"layout_{plain(name)}", None)
    order = "bhsd" if layout is None else layout.order
    sizes = dict(zip("bhsd", _shape(name, problem) or (), strict=False))
    return next(("bhsd".index(axis) for axis in order if sizes.get(axis, 1) > 1), 0)


def plain(name: str) -> str:
    """The field's name of a kernel's argument, as far as it can be told."""
    plain = re.sub(r"(_?ptr|_head|_sum)$", "", name.lower().strip("_"))
    return _ALIASES.get(plain, plain)


def operand(name: str) -> str:
    """The operand that an argument holds: k of k_pages too."""
    return re.sub(r"_(pages|cache)$", "", plain(name))


def _shape(name: str, problem: Problem) -> tuple[int, ...] | None:
    return {
        "q": problem.shape_q,
        "dq": problem.shape_q,
        "k": problem.shape_k,
        "dk": problem.shape_k,
        "v": problem.shape_v,
        "dv": problem.shape_v,
        "o": problem.shape_o,
        "do": problem.shape_o,
        "lse": problem.shape_lse,
        "delta": problem.shape_lse,
    }.get(plain(name))
