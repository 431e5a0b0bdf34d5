"""Judges your program against the unsharded module. A program is a parallel module, or steps of its training.

The modules of this package describe a program, and decide which cases can be judged.  `oracle/` computes the right
values, and `run/` runs the program on a rank. Neither of the two imports the other.
"""

SUBJECTS = {
    "module": "equivtest.programs.run.module:module",
}
