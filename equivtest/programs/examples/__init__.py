"""Programs that the shipped properties judge, and ways to make them parallel."""
