"""Triton's runtime and torch.cuda as kernels meet them: backend, driver, session."""
