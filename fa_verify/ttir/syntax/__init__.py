"""TTIR text as a small typed IR. Knows nothing of arrays or memory."""
