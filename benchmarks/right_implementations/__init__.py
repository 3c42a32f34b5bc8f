"""Right implementations of attention, for `benchmarks/false_alarms.py`: no case may fail."""
