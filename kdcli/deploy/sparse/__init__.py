"""Use pruned models: mask files, many masks on one base, compaction, and sparse CPU inference."""
