"""Cross entropy of a DTensor without loss_parallel."""
