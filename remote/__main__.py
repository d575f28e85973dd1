"""python -m remote --connect=...: a sampler on this host for a learner somewhere else."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in train.py: its idle threads sleep

from remote import sampler

if __name__ == "__main__":
    sampler.main()
