"""python -m remote --connect=...: a sampler on this host for a learner somewhere else."""

import machinery.startup  # isort: skip  # noqa: F401

from remote import sampler

if __name__ == "__main__":
    sampler.main()
