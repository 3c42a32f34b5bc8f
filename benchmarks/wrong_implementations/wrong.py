"""`Wrong`: an emulator of tests/emulator.py with places where a defect may step in."""
# ruff: noqa: D102 - what each hook is for is said once

from __future__ import annotations

import dataclasses

import torch
from right_implementations.emulation import Emulator

__all__ = ["DEFECTS", "Wrong", "defect", "masked", "termed"]


class Wrong(Emulator):
    """What a defect may change: who sees whom, what is handed in, what comes out.

    `given_back` is `given` of the backward pass; `gradients` may compute them again from other
    tensors by `redo`.
    """

    def seen(self, _problem, allowed):
        return allowed

    def given(self, problem, q, k, v, terms):
        return problem, q, k, v, terms

    def given_back(self, problem, q, k, v, terms):
        return self.given(problem, q, k, v, terms)

    def out(self, _problem, o, lse):
        return o, lse

    def gradients(self, _problem, _redo, grads, **_):
        return grads

    def _mask(self, problem):
        allowed = torch.from_numpy(problem.mask.allowed(problem.seqlen_q, problem.seqlen_k).copy())
        return self.seen(problem, allowed).repeat(problem.group, 1)

    def forward(self, problem, q, k, v, terms):
        given = self.given(problem, q, k, v, terms)
        return self.out(problem, *super().forward(*given))

    def backward(self, problem, q, k, v, o, lse, do, terms):
        problem_, q_, k_, v_, terms_ = self.given_back(problem, q, k, v, terms)

        def redo(**other):
            used = {"q": q_, "k": k_, "v": v_, "o": o, "lse": lse, "do": do, "terms": terms_}
            return Emulator.backward(self, problem_, *{**used, **other}.values())

        return self.gradients(problem, redo, list(redo()), do=do, terms=terms)


DEFECTS = {}


def defect(cls):
    """Enter a defect; its docstring says what is wrong."""
    DEFECTS[cls.__name__] = cls
    return cls


def masked(problem, **changes):
    """The problem with another mask."""
    return dataclasses.replace(problem, mask=dataclasses.replace(problem.mask, **changes))


def termed(terms, **changes):
    """Other terms."""
    return dataclasses.replace(terms, **changes)
