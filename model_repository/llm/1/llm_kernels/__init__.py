"""The CPU kernels: their C++ sources, and what compiles them."""
