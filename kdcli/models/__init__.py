"""Encoders: where their parts live, how to load, shrink, describe and listen to them."""
