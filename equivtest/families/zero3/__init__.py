"""ZeRO-3: parameters that lie divided among the ranks and are fetched for use."""
