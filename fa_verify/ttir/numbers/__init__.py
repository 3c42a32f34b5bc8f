"""Number formats and functions: how results are rounded. Knows arrays only."""
