"""The steps of a build as the user sees them: one bar, seconds per stage, peak memory. Writes to stderr only."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator

from tqdm import tqdm


class Stages:
    """`with stages("export"): ...` times a stage and moves the bar."""

    def __init__(self, names: tuple[str, ...], *, quiet: bool = False) -> None:
        self._quiet = quiet
        self.seconds: dict[str, float] = {}
        self._lines = not quiet and not sys.stderr.isatty()  # a log file gets a line per stage instead of a bar
        self._bar = tqdm(
            total=len(names),
            file=sys.stderr,
            disable=quiet or self._lines,
            bar_format="{desc:<12}|{bar:24}| {n_fmt}/{total_fmt} {elapsed} {postfix}",
        )
        self._name = ""
        self._tenth = 0

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._name = name
        self._bar.set_description_str(name)
        self._bar.set_postfix_str("")
        self._tenth = 0
        if self._lines:
            print(f"{name} …", file=sys.stderr, flush=True)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self._bar.update()
        if self._lines:
            print(f"{name:<12}{self.seconds[name]:6.1f} s", file=sys.stderr, flush=True)

    def progress(self, done: int, total: int) -> None:
        """How far the current stage is; shown on the bar, in a log at every tenth."""
        self._bar.set_postfix_str(f"{done}/{total}")
        tenth = 10 * done // total
        if self._lines and tenth != self._tenth and done < total:
            print(f"{self._name:<12}{done}/{total}", file=sys.stderr, flush=True)
        self._tenth = tenth

    def note(self, text: str) -> None:
        """A line above the bar."""
        if not self._quiet:
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
