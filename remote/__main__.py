"""python -m remote --connect=...: a sampler on this host for a learner somewhere else."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch is imported, as in train.py

from remote import sampler

if __name__ == "__main__":
    sampler.main()
