"""Native CPU kernels: the C++ code of csrc/, loaded through ctypes."""
