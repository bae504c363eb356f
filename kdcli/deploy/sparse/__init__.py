"""Use pruned models: mask files, several masks on one base, compaction, and sparse CPU inference."""
