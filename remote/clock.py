"""The learner's time, estimated by samplers: the age of a group is counted on one clock. HeteroRL,
section 4.2.

A sampler's clock may be hours off, so it stamps its groups with the learner's time, which it
estimates as NTP does. Over a socket a hello carries its own time `sent`, and the answer brings it
back with the learner's time `clock`:

    offset = clock - (sent + now) / 2        seconds to add to the own clock; wrong by half the round trip at most

The offset of the smallest round trip among the last few is the best. In a shared folder nothing is
answered, but each file is stamped by one clock, the file system's. With the learner's file, which
holds its time `clock`, and one of our own, written at `sent`:

    offset = (clock - stamp of that file) + (stamp of ours - sent)

Whoever was held up between looking at the clock and writing makes the first bracket too small, or
the second too large.

The learner does not trust a stamp blindly (`made_at`): no group was made after it came, or before
its weights were published. In delay.py, where samplers are simulated, the clock is one by
construction."""

from __future__ import annotations

from collections import deque

KEPT = 8  # measurements: a clock that is set again is followed after as many


class LearnerClock:
    """Estimates the offset of the learner's clock from the own one, in seconds. 0 before anything
    is known."""

    def __init__(self):
        self.answers: deque = deque(maxlen=KEPT)  # (round trip, offset)
        self.of_learner: deque = deque(maxlen=KEPT)  # clock - stamp
        self.of_own: deque = deque(maxlen=KEPT)  # stamp - clock

    def answered(self, sent: float, clock: float, now: float) -> None:
        """An answer to the hello of `sent`, both by the own clock, says that it was `clock` at the
        learner."""
        if now - sent >= 0:  # the own clock was not set back meanwhile
            self.answers.append((now - sent, clock - (sent + now) / 2))

    def stamped_there(self, clock: float, stamp: float) -> None:
        """A file that the learner wrote at `clock` is stamped so by the file system."""
        self.of_learner.append(clock - stamp)

    def stamped_here(self, sent: float, stamp: float) -> None:
        """The same of a file that we wrote."""
        self.of_own.append(stamp - sent)

    @property
    def offset(self) -> float:
        if self.answers:
            return min(self.answers)[1]
        if self.of_learner and self.of_own:
            return max(self.of_learner) + min(self.of_own)
        return 0.0


def made_at(stamp: float, published: float, arrived: float) -> float:
    """When a group was made, by the learner's clock, as far as its stamp can be believed."""
    return min(max(stamp, published), arrived)
