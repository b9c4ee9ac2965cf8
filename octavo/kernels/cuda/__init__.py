"""GPU kernels in Triton: each module has kernels, and the functions that launch them.

They fill tensors that their callers have allocated. They allocate nothing and never synchronize,
and their grids depend on shapes alone, so that whole steps can be captured in CUDA graphs: padding
rows of a captured shape have slot -1, which is not written, and length 0, which reads nothing.
Triton is imported by the modules in here, which nothing imports where there is no GPU.
"""

import os

# Products and sums may be fused, as all kernels were tested: Triton 3.10 no longer does by default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
