"""Measures of quality that need no network."""
