"""The zoo's own attention kernels: small and right. Defects are planted in copies of them.

Loaded by path from a copy, never imported from here.
"""
