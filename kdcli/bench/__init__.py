"""Measuring, and what this machine can run."""
