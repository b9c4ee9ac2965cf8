"""Operations of models: references in PyTorch, native kernels for CPUs, Triton kernels for GPUs."""
