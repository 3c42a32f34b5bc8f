"""Memory that shows what a kernel does outside of its tensors: poison, canaries, unmapped pages."""
