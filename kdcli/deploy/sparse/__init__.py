"""Pruned models in use: mask files, many masks on one base, compacted models, sparse inference on
the CPU."""
