"""Operands of Hopper's products in registers, and a fault of Triton in when they are written again.

A product (wgmma) goes on while the program does. The registers that it reads A from may not be
written until `wgmma.wait_group` has waited for it (PTX ISA, "wgmma.mma_async"). Triton lets the
products at the end of a loop's body go on into the next iteration when a wait lies in that body,
wherever it lies: a kernel that computes A anew before that wait overwrites what is still read. Seen
with Triton 3.6 and 3.7; 3.8 and 3.9 happen to compute A later. On an H200 forward passes found so
gave NaN, or were right by their timing.
"""

from __future__ import annotations

import re

__all__ = ["rewritten"]

_LABEL = re.compile(r"(\$L__BB\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L__BB\w+)")
_PRODUCT = re.compile(r"wgmma\.mma_async\S*\s*\{[^}]*\},\s*\{(?P<operand>[^}]*)\}")
_COMMIT = re.compile(r"wgmma\.commit_group\b")
_WAIT = re.compile(r"wgmma\.wait_group\S*\s+(?P<pending>\d+)")
# What an instruction names first it writes; a store names an address first, in brackets.
_WRITES = re.compile(r"(?:@!?%\w+\s+)?(?!wgmma)[\w.:]+\s+(\{[^}]*\}|%\w+)\s*,")
_REGISTER = re.compile(r"%\w+")


def rewritten(ptx: str) -> int:
    """How many registers a loop writes while a product of the iteration before may read them."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {found[1]: place for place, line in enumerate(lines) if (found := _LABEL.match(line))}
    registers: set[str] = set()
    for end, line in enumerate(lines):
        branch = _BRANCH.search(line)
        if branch and labels.get(branch[1], end) < end:
            registers |= _of_loop(lines[labels[branch[1]] : end])
    return len(registers)


def _of_loop(body: list[str]) -> set[str]:
    found: set[str] = set()
    for place, line in enumerate(body):
        if product := _PRODUCT.search(line):
            after = [*body[place + 1 :], *body[:place]]
            found |= _written(after, set(_REGISTER.findall(product["operand"])))
    return found


def _written(lines: list[str], registers: set[str]) -> set[str]:
    """Those that are written before the group that begins with these lines is waited for."""
    groups = 0
    found: set[str] = set()
    for line in lines:
        groups += bool(_COMMIT.match(line))
        wait = _WAIT.match(line)
        if wait and groups > int(wait["pending"]):
            break
        if writes := _WRITES.match(line):
            found |= registers.intersection(_REGISTER.findall(writes[1]))
    return found
