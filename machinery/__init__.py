"""Flags, run folders, checkpoints, optimizers, plots: used by every command, described by no
paper."""
