"""The property-based suite, to point at any kernel: ``pytest -n auto --kernel file.py:name``."""
