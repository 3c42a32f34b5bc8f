"""The short PTX texts of inline assembly, run on arrays of bits."""
