"""Data: text as packed blocks, labelled tasks, and the order of their examples."""
