"""Cases of the cross entropy of DTensors without loss_parallel."""
