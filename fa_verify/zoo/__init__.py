"""The zoo: known defects of attention kernels, each planted in a copy of a small right kernel.

`rows/*.toml` tells every defect once; `kernels/` holds the right kernels; `defects` joins the two.
"""
