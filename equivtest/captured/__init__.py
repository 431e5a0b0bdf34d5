"""A run that happened in another job, stored as a folder: a file of tensors and a manifest for each rank."""
