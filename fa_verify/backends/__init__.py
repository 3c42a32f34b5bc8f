"""Where kernels run: `cpu` over `fa_verify.ttir`, and `cuda`."""
