"""Progress of long operations: a rich bar on stderr, a callback, or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

#: Gets (done, total).
Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """A Progress that shows nothing."""


@contextlib.contextmanager
def reporter(progress: bool | Progress, label: str, *, in_bytes: bool = False) -> Iterator[Progress]:
    """A Progress for one operation.

    Parameters
    ----------
    progress : bool or callable
        True shows a bar, False nothing; a callable is used as it is.
    label : str
        What the bar says.
    in_bytes : bool
        Numbers are bytes.
    """
    if callable(progress):
        yield progress
        return
    if not progress:
        yield silent
        return
    from rich import progress as rich_progress
    from rich.console import Console

    amount = rich_progress.DownloadColumn() if in_bytes else rich_progress.MofNCompleteColumn()
    with rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        amount,
        rich_progress.TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
