"""``python -m fa_verify.ttir``: programs and test suites written for a GPU."""
