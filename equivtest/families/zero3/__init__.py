"""Families about ZeRO-3, in which parameters are partitioned over the ranks and fetched when they are used."""
