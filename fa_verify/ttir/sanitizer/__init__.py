"""What kernels must not do: how it is noticed, judged and put into words."""
