"""How fast kernels are on a device, side by side with PyTorch's own attention."""
