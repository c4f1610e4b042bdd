"""Layers of a decoder as one operation of OpenVINO, on kernels of our own."""
