"""`runtime bench`: load generation, latency statistics, the batch knee and the roofline. See docs/benchmarking.md."""
