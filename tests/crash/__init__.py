"""Whatever stops training, it goes on from a committed step: processes are killed, disks lose what was not flushed.

training.py   what is trained, and what its state must be after every event of it
processes.py  forked children, and the two preloaded libraries that they run with
kills.py      SIGKILL at random moments, and at every call that changes a file
power.py      what is on a disk when the power fails at any instant of a recorded run
near.py       SIGKILL of runs with `gpu:` beside their directories

`python tests/crash --help` runs it for as long as you like; tests/test_crash.py a little of it.
"""
