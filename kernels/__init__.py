"""Attention kernels in Triton, one module a family, each verified by fa_verify.

Loaded by path, never installed: a well-known package is called ``kernels`` too.
"""
