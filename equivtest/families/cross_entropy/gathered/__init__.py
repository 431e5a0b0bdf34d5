"""Family of cases that compute a cross entropy of DTensors without loss_parallel."""
