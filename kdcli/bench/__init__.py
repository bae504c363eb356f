"""Latency measurements, and a check of the machine."""
