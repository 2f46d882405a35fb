"""Many requests to a server at once, a bounded number of them in flight.

Contract: results come as they are done, in any order. After a failure no new request starts; what was in flight still
comes, then the failure is raised. The threads end with the process, so Ctrl-C does not wait for a slow server.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_concurrently(
    jobs: Iterable[Job], work: Callable[[Job], Result], concurrency: int
) -> Iterator[tuple[Job, Result]]:
    """(job, result) of every job, at most `concurrency` running. Raises what the first failing `work` raised."""
    source, guard, halted = iter(jobs), threading.Lock(), threading.Event()
    done: queue.Queue[tuple[Job, Result] | BaseException | None] = queue.Queue(maxsize=4 * concurrency)

    def serve() -> None:
        try:
            while not halted.is_set():
                with guard:
                    job = next(source, None)
                if job is None:
                    break
                done.put((job, work(job)))
        except BaseException as error:
            halted.set()
            done.put(error)
        finally:
            done.put(None)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    failure: BaseException | None = None
    left = len(threads)
    try:
        while left:
            item = done.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                failure = failure or item
            else:
                yield item
    finally:
        halted.set()
    if failure is not None:
        raise failure
