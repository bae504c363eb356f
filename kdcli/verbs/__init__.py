"""One file a verb; none imports another."""
