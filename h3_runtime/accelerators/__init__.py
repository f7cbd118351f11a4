"""Accelerators: one file each, listed here. Being listed is being labelled, shown, reachable and tested."""

from .base import Accelerator, fold

ACCELERATORS: tuple[type[Accelerator], ...] = ()

__all__ = ["ACCELERATORS", "Accelerator", "fold"]
