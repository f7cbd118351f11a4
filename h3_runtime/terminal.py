"""What the command line says: sentences, and how far the work is.

denoise 12/49, 310 s left        rewritten in place on a terminal; elsewhere a line every 15 seconds
"""

from __future__ import annotations

import sys
import time

LOG_SECONDS = 15  # between two lines of progress where the output is no terminal


class Say:
    """Prints sentences and a progress line, to stdout, or to stderr where stdout carries JSON."""

    def __init__(self, to_stderr: bool):
        self.stream = sys.stderr if to_stderr else sys.stdout
        self.began: dict[str, float] = {}
        self.told = time.monotonic()
        self.open_line = False

    def __call__(self, sentence: str) -> None:
        if self.open_line:
            print(file=self.stream)
            self.open_line = False
        print(sentence, file=self.stream, flush=True)

    def progress(self, stage: str, done: int, total: int) -> None:
        """One line per stage, rewritten on a terminal: done, total and the time left."""
        now = time.monotonic()
        began = self.began.setdefault(stage, now)
        left = ""
        if 0 < done < total and now > began:
            # the first report of a counted stage comes after its first item, so began is late by one item
            per_item = (now - began) / max(done - 1, 1) if done > 1 else 0.0
            left = f", {per_item * (total - done):.0f} s left" if per_item else ""
        line = f"{stage} {done}/{total}{left}"
        if self.stream.isatty():
            print(f"\r{line:<60}", end="" if done < total else "\n", file=self.stream, flush=True)
            self.open_line = done < total
        elif done == total or (done and now - self.told >= LOG_SECONDS):
            self(line)
            self.told = now
        if done == total:
            self.began.pop(stage, None)
