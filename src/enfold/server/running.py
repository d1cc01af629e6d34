"""Run the server: the port is taken before the model is loaded, and SIGTERM ends it within 10 seconds."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from enfold.errors import ConfigError
from enfold.server.app import make_app

if TYPE_CHECKING:
    from enfold.server.service import Service

CLOSE_S = 1.0
"""What open connections have to take their answers, once all work is done."""

BACKLOG = 512
Say = Callable[[str], None]


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raise ConfigError where the address can't be had. Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"can't listen on {host} port {port}: {reason}; choose another --port or --host") from error


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # signals are `serve`'s own business
        yield


def serve(service: Service, listening: socket.socket, say: Say) -> None:
    """Load the model and answer requests until SIGINT or SIGTERM; raise what loading failed with.

    No rank is left when it returns. A second signal does not wait for running requests.
    """
    asyncio.run(_serve(service, listening, say))


async def _serve(service: Service, listening: socket.socket, say: Say) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    failed: list[BaseException] = []

    def on_failure(error: BaseException) -> None:
        if service.closing:  # its ranks were ended while they loaded
            return
        failed.append(error)
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody asks any more
            loop.call_soon_threadsafe(stop.set)

    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False, "ws": "none"}
    config = uvicorn.Config(make_app(service), timeout_graceful_shutdown=1, **quiet)
    server = _Server(config)
    with _signals(loop, stop):
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        service.start(lambda: say_ready(service, say), on_failure)
        waiting = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not failed:
            say("shutting down: running requests are finished, no more are taken")
        stop.clear()
        await _drain(service, stop)
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving, CLOSE_S + 1)
        waiting.cancel()
    if failed:
        raise failed[0]


async def _drain(service: Service, again: asyncio.Event) -> None:
    """End the service; a second signal cuts it short."""
    draining = asyncio.create_task(asyncio.to_thread(service.drain))
    second = asyncio.create_task(again.wait())
    await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        await asyncio.to_thread(service.abandon)
    second.cancel()
    await draining


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> Iterator[None]:
    """Let SIGINT and SIGTERM set the event; afterwards the handlers from before are back."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


def say_ready(service: Service, say: Say) -> None:
    """Tell how the model is spread, in words."""
    for name, words in service.backend.words().items():
        say(f"{name}: {words}")
    say(f"ready: {service.settings.model} on {service.backend.num_replicas} replica(s)")
