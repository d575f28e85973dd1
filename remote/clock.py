"""Estimation of the learner's time by samplers, so that one clock measures the age of all groups.
HeteroRL, section 4.2.

A sampler's clock may be hours off. So a sampler stamps its groups with the learner's time, which it
estimates as NTP does. Over a socket a hello carries the sampler's time `sent`, and the answer
returns `sent` with the learner's time `clock`:

    offset = clock - (sent + now) / 2        seconds to add to the own clock; wrong by half the round trip at most

The offset with the smallest round trip among the last few is used. In a shared folder there are no
answers, but one clock, the file system's, stamps all files. The learner's file holds its time
`clock`; the sampler writes its own file at `sent`:

    offset = (clock - stamp of the learner's file) + (stamp of the sampler's file - sent)

A delay between reading the clock and writing the file makes the first bracket too small, or the
second too large.

The learner does not trust a stamp blindly (`made_at`): a group cannot be made after it arrived, or
before its weights were published. In delay.py samplers are simulated, so there is only one
clock."""

from __future__ import annotations

from collections import deque

KEPT = 8  # measurements; the offset follows a clock that is set again after as many


class LearnerClock:
    """Estimates the offset of the learner's clock from the own clock, in seconds; 0 before the
    first measurement."""

    def __init__(self):
        self.answers: deque = deque(maxlen=KEPT)  # (round trip, offset)
        self.of_learner: deque = deque(maxlen=KEPT)  # clock - stamp
        self.of_own: deque = deque(maxlen=KEPT)  # stamp - clock

    def answered(self, sent: float, clock: float, now: float) -> None:
        """Record the learner's answer: its time was `clock` between `sent` and `now` on the own
        clock."""
        if now - sent >= 0:  # the own clock was not set back meanwhile
            self.answers.append((now - sent, clock - (sent + now) / 2))

    def stamped_there(self, clock: float, stamp: float) -> None:
        """Record that the file system stamped `stamp` on a file that the learner wrote at
        `clock`."""
        self.of_learner.append(clock - stamp)

    def stamped_here(self, sent: float, stamp: float) -> None:
        """Record that the file system stamped `stamp` on a file that this sampler wrote at
        `sent`."""
        self.of_own.append(stamp - sent)

    @property
    def offset(self) -> float:
        if self.answers:
            return min(self.answers)[1]
        if self.of_learner and self.of_own:
            return max(self.of_learner) + min(self.of_own)
        return 0.0


def made_at(stamp: float, published: float, arrived: float) -> float:
    """When a group was made, by the learner's clock: its stamp, clipped to the possible range."""
    return min(max(stamp, published), arrived)
