"""torch's documentation of its wrappers, judged argument by argument: too long for the gate."""
