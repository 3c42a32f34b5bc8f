"""Small wrong changes to any kernel's IR and launch, each at one place of its source.

Knows nothing about attention, and runs nothing: `ttir.execute` does, under `Options.alteration`.
"""
