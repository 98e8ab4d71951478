"""The same quantities as Triton kernels; importing a module of this package imports triton."""
