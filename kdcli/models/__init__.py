"""Encoders: where their parts are, how to load, shrink, describe and capture them."""
