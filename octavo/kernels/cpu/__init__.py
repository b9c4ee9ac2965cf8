"""Native CPU kernels: csrc/ in C++, loaded through ctypes."""
