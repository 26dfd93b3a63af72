"""Implement the three kinds of exchange between a client and torch's server.

`ask` sends a request on the shared connection and reads the immediate answer. `tell` sends a
request that is not answered. `hold` runs an exchange that can block, on a separate connection. If
an exchange fails, the error names the operation, the key and the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from echelon.errors import StoreError
from echelon.store.client.channel import Channel
from echelon.store.client.pool import Pool
from echelon.store.client.session import show
from echelon.store.deadline import Deadline

T = TypeVar("T")


class Exchanges:
    """The exchanges over the connections of one client.

    A call with `can_repeat=True` is retried if its connection breaks, unless unconfirmed writes
    might have been lost. `ask` retries a request at most once, and `hold` at most twice.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def ask(
        self,
        operation: str,
        key: bytes,
        request: bytes,
        read: Callable[[Channel, Deadline], T],
        deadline: Deadline,
        *,
        can_repeat: bool = False,
    ) -> T:
        """Send a request that is answered immediately, and read the answer."""
        name = show(key)
        pool = self._pool
        lock = pool.turn(operation, name, deadline)
        try:
            for is_last in (not can_repeat, True):
                channel = pool.main(operation, name, deadline)
                had_unconfirmed = channel.num_unconfirmed > 0
                try:
                    channel.send(request, deadline)
                    answer = read(channel, deadline)
                except TimeoutError as error:
                    pool.drop(channel)
                    raise pool.timed_out(operation, name, deadline, str(error)) from None
                except OSError as error:
                    failure = pool.lost(operation, name, channel, error)
                    if is_last or had_unconfirmed:
                        raise failure from None
                    continue
                except BaseException:
                    pool.drop(channel)
                    raise
                channel.num_unconfirmed = 0
                return answer
        finally:
            lock.release()
        raise AssertionError("this line should be unreachable")

    def tell(self, operation: str, key: bytes, request: bytes, deadline: Deadline) -> None:
        """Send a request to which the server does not reply."""
        name = show(key)
        pool = self._pool
        lock = pool.turn(operation, name, deadline)
        try:
            channel = pool.main(operation, name, deadline)
            channel.num_unconfirmed += 1
            try:
                channel.send(request, deadline)
            except TimeoutError as error:
                pool.drop(channel)
                raise pool.timed_out(operation, name, deadline, str(error)) from None
            except OSError as error:
                raise pool.lost(operation, name, channel, error) from None
            except BaseException:
                pool.drop(channel)
                raise
        finally:
            lock.release()

    def hold(
        self,
        operation: str,
        key: bytes,
        request: bytes,
        exchange: Callable[[Channel, Deadline], T],
        deadline: Deadline,
        *,
        can_repeat: bool = False,
    ) -> T:
        """Run an exchange that can block for a long time, on a separate connection.

        The function `exchange` reads the answer. At the deadline, it must cancel the request, and
        then return or raise an exception.
        """
        name = show(key)
        pool = self._pool
        for is_last in (not can_repeat, False, True):
            channel = pool.take_away(operation, name, deadline)
            try:
                channel.send(request, deadline)
                answer = exchange(channel, deadline)
            except StoreError:
                pool.give_back(channel)
                raise
            except TimeoutError as error:
                pool.drop(channel)
                raise pool.timed_out(operation, name, deadline, str(error)) from None
            except OSError as error:
                failure = pool.lost(operation, name, channel, error)
                if not is_last and deadline.left_s > 0 and not pool.is_closed:
                    continue
                raise failure from None
            except BaseException:
                pool.drop(channel)
                raise
            pool.give_back(channel)
            return answer
        raise AssertionError("this line should be unreachable")
