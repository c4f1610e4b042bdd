"""Paged attention on the CPU: kernels of our own, as an OpenVINO extension."""
