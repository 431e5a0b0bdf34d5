"""Families about ZeRO-3: parameters that are partitioned over the ranks and fetched when they are used."""
