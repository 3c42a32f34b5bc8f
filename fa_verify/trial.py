"""`Trial`: one kernel on one case. Execution and bounds, each computed once, on demand."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from fa_verify import bounds
from fa_verify.inputs import Inputs, duplicate, materialise
from fa_verify.kernel import Grads, Outputs
from fa_verify.terms import Terms

if TYPE_CHECKING:
    import torch

    from fa_verify.backends.base import Backend, Execution, Setup
    from fa_verify.bounds import Bounded
    from fa_verify.case import Case
    from fa_verify.kernel import Kernel
    from fa_verify.problem import Problem

__all__ = ["RUN_CASES", "RUN_RISK", "TENSOR_RISK", "Trial"]

# A whole run of right kernels has a probabilistic failure with probability at most RUN_RISK as long
# as it judges at most RUN_CASES cases of five tensors each, element by element and in two
# ways as a whole (union bound, docs/bounds.md).
RUN_RISK = 1e-6
RUN_CASES = 1_000_000
TENSOR_RISK = RUN_RISK / (15 * RUN_CASES)

# Logits up to which a case that ran on a card is judged on the CPU, where nothing is launched;
# `benchmarks/case_cost.py` measures both. Where eight workers shared a card no choice up to 2^15
# made a difference that could be measured; above, the CPU falls behind.
_ON_THE_CPU = 1 << 12


class Trial:
    """What the checks look at.

    Attributes:
        kernel: The kernel; case: the case; setup: how it is run; backend: what runs it.
        independent: The case was drawn independently of any search: the probabilistic bound counts.
    """

    def __init__(
        self,
        kernel: Kernel,
        case: Case,
        setup: Setup,
        backend: Backend,
        *,
        independent: bool = True,
    ) -> None:
        """Remember what to run; nothing runs yet."""
        self.independent = independent
        self.kernel = kernel
        self.case = case
        self.setup = setup
        self.backend = backend

    @functools.cached_property
    def device(self) -> str:
        """Where the case is judged: small ones on the CPU, wherever the kernel runs."""
        p = self.case.problem
        small = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k <= _ON_THE_CPU
        return "cpu" if small else self.backend.device

    @functools.cached_property
    def pristine(self) -> Inputs:
        """q, k, v, do that no kernel has touched, where the case is judged."""
        return materialise(self.case, device=self.device)

    @functools.cached_property
    def inputs(self) -> Inputs:
        """The same on the backend's device. The kernel is handed these very tensors."""
        return duplicate(self.pristine, self.backend.device)

    @functools.cached_property
    def terms(self) -> Terms:
        """What the problem has beside q, k and v, where the case is judged."""
        x, keep, states = self.pristine, None, self.kernel.dropout_keep
        if x.dropout_seed is not None:
            assert states is not None  # noqa: S101 - a kernel that takes dropout has one
            keep = states(self.case.problem, x.dropout_seed, self.device)
        return Terms(
            bias=x.bias,
            slopes=x.alibi_slopes,
            sinks=x.sinks,
            dlse=x.dlse,
            keep=keep,
            q_scale=x.q_scale,
            k_scale=x.k_scale,
            v_scale=x.v_scale,
        )

    @functools.cached_property
    def launched(self) -> Execution:
        """The run that is judged, as the kernel left it on the backend's device."""
        return self.backend.run(
            self.kernel, self.case.problem, self.inputs, self.setup, backward=self.case.backward
        )

    @functools.cached_property
    def execution(self) -> Execution:
        """The run that is judged, its tensors where the case is judged."""
        return self.launched.to(self.device)

    def part(self, batch: slice, kv_heads: slice) -> Trial:
        """Some sequences and key heads of the run as a trial of their own, judged by det alone.

        Its inputs and results are views of these; nothing runs again. `RUN_RISK` counts cases, not
        their parts, hence det. Gradients of a bias and of sinks are of no part: nobody judges them.
        """
        p, x, ran = self.case.problem, self.pristine, self.execution
        kv = kv_heads.stop - kv_heads.start
        heads = slice(kv_heads.start * p.group, kv_heads.stop * p.group)

        def cut(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
            key_like = name in ("k", "v", "dk", "dv")
            return None if tensor is None else tensor[batch, kv_heads if key_like else heads]

        size = batch.stop - batch.start
        problem = dataclasses.replace(p, batch=size, heads_q=kv * p.group, heads_kv=kv)
        case = dataclasses.replace(self.case, problem=problem)
        part = Trial(self.kernel, case, self.setup, self.backend, independent=False)
        o, grads = ran.outputs, ran.grads
        some = {name: m for name, m in ran.unwritten.items() if name not in ("dbias", "dsinks")}
        unwritten = {name: cut(name, mask) for name, mask in some.items()}
        own = {name: getattr(x, name) for name in ("q", "k", "v", "do")}
        known = {
            "device": self.device,
            "pristine": Inputs(**{name: cut(name, tensor) for name, tensor in own.items()}),  # type: ignore[arg-type]
            "terms": self.terms.part(batch, heads, kv_heads),
            "execution": dataclasses.replace(
                ran,
                outputs=o and Outputs(cut("o", o.o), cut("lse", o.lse), o.saved),  # type: ignore[arg-type]
                grads=grads
                and Grads(*(cut(name, getattr(grads, name)) for name in ("dq", "dk", "dv"))),  # type: ignore[arg-type]
                unwritten={name: m for name, m in unwritten.items() if m is not None and m.any()},
            ),
        }
        part.__dict__.update(known)
        return part

    @property
    def execution_so_far(self) -> Execution | None:
        """The execution if there was one; nothing is run for this."""
        return self.__dict__.get("launched")

    def rerun(
        self,
        inputs: Inputs,
        *,
        problem: Problem | None = None,
        backward: bool = False,
        **setup: object,
    ) -> Execution:
        """Run again, on other inputs, on another problem, or under another schedule."""
        # A card's backend moves them into slots, and what is pristine stays so.
        if self.backend.device != "cpu" or inputs is self.pristine:
            inputs = duplicate(inputs, self.backend.device)
        again = self.backend.run(
            self.kernel,
            problem or self.case.problem,
            inputs,
            dataclasses.replace(self.setup, **setup),  # type: ignore[arg-type]
            backward=backward,
        )
        return again.to(self.device)

    @functools.cached_property
    def forward_bounds(self) -> tuple[Bounded, Bounded]:
        """Exact o and lse, and how far off a right kernel may be."""
        x = self.pristine
        return bounds.bound_forward(
            self.case.problem,
            self.kernel.arithmetic,
            x.q,
            x.k,
            x.v,
            terms=self.terms,
            known=self._known,
            d=TENSOR_RISK,
        )

    @functools.cached_property
    def _known(self) -> bounds.Known:
        """What the bounds of both passes need of the inputs."""
        x = self.pristine
        return bounds.known_operands(
            self.case.problem, self.kernel.arithmetic, x.q, x.k, x.v, x.do, terms=self.terms
        )

    @functools.cached_property
    def dq_spread(self) -> torch.Tensor:
        """How far apart two runs' dq may be that are summed by atomics, o and lse being the same.

        To be asked for only where the gradients are judged for the observed o and lse.
        """
        x, outputs = self.pristine, self.execution.outputs
        assert x.do is not None  # noqa: S101 - there is a dq
        assert outputs is not None  # noqa: S101 - likewise
        assert outputs.lse is not None  # noqa: S101 - it is observed
        return bounds.dq_spread(
            self.case.problem,
            self.kernel.arithmetic,
            x.q,
            x.k,
            x.v,
            x.do,
            terms=self.terms,
            o=outputs.o,
            lse=outputs.lse,
            dq=self.backward_bounds[0],
        )

    @functools.cached_property
    def backward_bounds(self) -> tuple[Bounded, ...]:
        """The gradients, conditional on the observed o and lse where the kernel exposes both."""
        outputs = self.execution.outputs
        if outputs is None or outputs.lse is None:
            return self.unconditional_bounds
        return self._gradients(o=outputs.o, lse=outputs.lse)

    @functools.cached_property
    def unconditional_bounds(self) -> tuple[Bounded, ...]:
        """The gradients, whatever o and lse came out."""
        return self._gradients()

    def _gradients(self, **observed: torch.Tensor) -> tuple[Bounded, ...]:
        x = self.pristine
        assert x.do is not None  # noqa: S101 - materialise gives one for a backward case
        return bounds.bound_backward(
            self.case.problem,
            self.kernel.arithmetic,
            x.q,
            x.k,
            x.v,
            x.do,
            terms=self.terms,
            known=self._known,
            o=observed.get("o"),
            lse=observed.get("lse"),
            d=TENSOR_RISK,
        )
