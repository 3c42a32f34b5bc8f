"""Cases under NVIDIA's compute-sanitizer, or under Triton's own instrumentation, on the card.

Each runs in a process of its own. What a tool says becomes failures like all others. A tool that
does not see a fault planted for it is unavailable here: its silence is never a pass.
"""
