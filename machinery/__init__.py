"""Flags, run folders, checkpoints, optimizers and plots: infrastructure of every command."""
