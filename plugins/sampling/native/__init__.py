"""Sampling on the CPU: a kernel of our own, in the library of the others (plugins/quantized_matmul/native.py)."""
