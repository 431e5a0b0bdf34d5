"""Measures the speed of the harness beside bare rank programs: ratios within one run, medians, never asserted."""
