"""Judges users' programs against the unsharded module: a module, parallelized, or steps of its training.

The modules here describe a program, and decide which cases can be judged.  `oracle/` computes the right answers, `run/`
runs the program on a rank, and neither imports the other.
"""

SUBJECTS = {
    "module": "equivtest.programs.run.module:module",
}
