"""Numerical-correctness and fuzz-testing harness for Triton attention kernels."""

from fa_verify.arithmetic import Arithmetic
from fa_verify.capabilities import Capabilities
from fa_verify.kernel import Grads, Kernel, Outputs
from fa_verify.masks import Mask
from fa_verify.problem import Problem

__all__ = ["Arithmetic", "Capabilities", "Grads", "Kernel", "Mask", "Outputs", "Problem"]
