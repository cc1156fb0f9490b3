"""Benchmarks against bare JAX and other libraries; `make bench` runs them."""
