"""A run that happened elsewhere, as a folder: a file of tensors and a manifest for each rank."""
