"""Matrix multiplication with integer weights on the CPU: kernels of our own, as an OpenVINO extension."""
