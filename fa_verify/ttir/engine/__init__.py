"""Runs a lowered kernel over its grid: waves, control flow, programs that wait."""
