"""ZeRO-3: parameters that are divided among the ranks and are fetched when they are used."""
