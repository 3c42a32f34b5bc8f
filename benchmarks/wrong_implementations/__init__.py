"""Implementations that are wrong in one condition only, for `benchmarks/missed_defects.py`."""
