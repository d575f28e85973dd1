"""python -m remote --connect=...: run a sampler on this host for a learner on a different host."""

import machinery.startup  # isort: skip  # noqa: F401

from remote import sampler

if __name__ == "__main__":
    sampler.main()
