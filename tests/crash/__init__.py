"""Whatever stops a training, it resumes from a committed step: processes are killed, disks lose what was not flushed.

training.py   the training, and what its state must be after every event
processes.py  forked children, and the two libraries that are preloaded into them
kills.py      SIGKILL at random moments, and at every call that changes a file
on_ranks.py   SIGKILL of one rank of several, at calls that change a file
power.py      what may be on a disk when the power fails at any instant of a recorded run
gpu.py       SIGKILL of runs with `gpu:` beside their directories

`python tests/crash` runs it for as long as you like (see --help); tests/store/test_crash.py runs a little of it.
"""
