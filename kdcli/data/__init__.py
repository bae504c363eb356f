"""Data: text into packed blocks, tasks, and the order in which a run sees them."""
