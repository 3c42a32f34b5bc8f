"""One thread for each process: workers share the cores, and small products gain nothing by more."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
