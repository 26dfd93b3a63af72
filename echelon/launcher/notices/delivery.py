"""Deliver notices to commands and URLs without delaying the job.

Each receiver has its own thread and a short queue, so a receiver that hangs does not delay other
receivers. A notice that cannot be delivered is reported in one line.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

COMMAND_S = 30.0
REQUEST_S = 10.0
PAUSES_S = (1.0, 4.0)  # before the second and the third attempt of a request
_MAX_WAITING = 64
_TOO_MANY = 429
_SERVER_ERROR = 500
_REDIRECTS = (301, 302, 303, 307, 308)
_LINE_CHARS = 200


class _Stay(urllib.request.HTTPRedirectHandler):
    """A handler that refuses redirects, so that no other host receives a notice or password."""

    def redirect_request(self, *_: Any) -> None:
        """Refuse the redirect."""


_opener = urllib.request.build_opener(_Stay)


class DeliveryError(Exception):
    """A failed delivery of a notice. `may_retry` is True if another attempt might succeed."""

    def __init__(self, why: str, *, may_retry: bool = False) -> None:
        super().__init__(why)
        self.may_retry = may_retry


def is_url(receiver: str) -> bool:
    """Return whether a receiver is a URL rather than a command."""
    return receiver.lower().startswith(("http://", "https://"))


class Delivery:
    """A sender of notices to one receiver.

    Args:
        receiver: a URL, or a command for /bin/sh that receives the notice on its stdin.
        say: a thread-safe function that prints a line.
        command_s: the time limit for a command, in seconds, after which its process group is
            killed.
        request_s: the time limit for each blocking step of a request, in seconds.
        pauses_s: the pauses between attempts at a request, in seconds.
    """

    def __init__(
        self,
        receiver: str,
        say: Callable[[str], None],
        *,
        command_s: float = COMMAND_S,
        request_s: float = REQUEST_S,
        pauses_s: tuple[float, ...] = PAUSES_S,
    ) -> None:
        self._receiver, self._say = receiver, say
        self._command_s, self._request_s, self._pauses_s = command_s, request_s, pauses_s
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_MAX_WAITING)
        self._closing = threading.Event()
        self._running: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._serve, name="echelon-notify", daemon=True)
        self._thread.start()

    def send(self, notice: Mapping[str, Any]) -> None:
        """Queue a notice without blocking; drop the notice if 64 are already waiting."""
        try:
            self._waiting.put_nowait(json.dumps(notice).encode() + b"\n")
        except queue.Full:
            self._say(f"--notify {self.shown}: too slow; a notice ({notice['event']}) was dropped")

    def close(self, wait_s: float) -> None:
        """Deliver the waiting notices; drop those not delivered within `wait_s` seconds."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(wait_s)
        if self._thread.is_alive():
            self._closing.set()
            self._end_command()
            self._say(f"--notify {self.shown}: not finished within {wait_s:g} s; abandoned")

    @property
    def shown(self) -> str:
        """The receiver as shown to the user, without the parts of a URL that might be secret."""
        if is_url(self._receiver):
            parts = urlsplit(self._receiver)
            return f"{parts.scheme}://{parts.hostname or ''}"
        return self._receiver.split()[0] if self._receiver.split() else self._receiver

    def _serve(self) -> None:
        while (data := self._waiting.get()) is not None and not self._closing.is_set():
            try:
                self._deliver(data)
            except DeliveryError as err:
                if not self._closing.is_set():
                    line = " ".join(str(err).split())[:_LINE_CHARS]
                    self._say(f"--notify {self.shown}: {line}")

    def _deliver(self, data: bytes) -> None:
        if not is_url(self._receiver):
            self._run(data)
            return
        for pause_s in (*self._pauses_s, None):
            try:
                self._post(data)
            except DeliveryError as err:
                if pause_s is None or not err.may_retry or self._closing.wait(pause_s):
                    raise
            else:
                return

    def _run(self, data: bytes) -> None:
        """Run the command in its own session.

        Raises:
            DeliveryError: the command could not be started, failed, or took too long.
        """
        try:
            self._running = running = subprocess.Popen(
                ["/bin/sh", "-c", self._receiver],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as err:
            raise DeliveryError(f"cannot start the command: {err.strerror or err}") from err
        if self._closing.is_set():  # set just before the command was started
            self._end_command()
        try:
            with contextlib.suppress(BrokenPipeError):  # a command need not read
                running.communicate(data, timeout=self._command_s)
        except subprocess.TimeoutExpired:
            self._end_command()
            raise DeliveryError(
                f"the command was killed because it did not finish within {self._command_s:g} s"
            ) from None
        finally:
            self._running = None
        if running.returncode:
            raise DeliveryError(f"the command ended with exit code {running.returncode}")

    def _end_command(self) -> None:
        running = self._running
        if running is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(running.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(1.0)

    def _post(self, data: bytes) -> None:
        """Post a notice in a single request.

        Raises:
            DeliveryError: the request was not accepted.
        """
        headers = {"Content-Type": "application/json", "User-Agent": "echelon"}
        try:
            url, user = _without_user(self._receiver)
            if user:
                headers["Authorization"] = "Basic " + b64encode(user.encode()).decode()
            request = urllib.request.Request(  # noqa: S310 -- the scheme was checked
                url, data, headers, method="POST"
            )
            with _opener.open(request, timeout=self._request_s) as answer:
                answer.read(1)
        except urllib.error.HTTPError as err:
            err.close()
            if err.code in _REDIRECTS:
                why = "redirects are not followed; give the final URL"
                raise DeliveryError(f"the server returned HTTP {err.code}: {why}") from err
            may_retry = err.code == _TOO_MANY or err.code >= _SERVER_ERROR
            raise DeliveryError(
                f"the server returned HTTP {err.code}", may_retry=may_retry
            ) from err
        except urllib.error.URLError as err:
            raise DeliveryError(f"cannot connect: {err.reason}", may_retry=True) from err
        except (OSError, http.client.HTTPException) as err:
            raise DeliveryError(
                f"the request failed: {type(err).__name__}", may_retry=True
            ) from err
        except ValueError as err:
            raise DeliveryError(f"not a valid URL: {err}") from err


def _without_user(url: str) -> tuple[str, str]:
    """Split `http://user:password@host/` into the URL without credentials, and "user:password"."""
    parts = urlsplit(url)
    user, at, place = parts.netloc.rpartition("@")
    return parts._replace(netloc=place).geturl(), unquote(user) if at else ""
