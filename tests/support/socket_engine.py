"""What doubles of engines and of their launchers have in common."""

from __future__ import annotations

import asyncio


class SocketEngine:
    """An engine at the other end of ``connection``, a socket."""

    async def connect(self, protocol):
        await asyncio.get_running_loop().create_unix_connection(protocol, sock=self.connection)


class SocketLauncher:
    """A launcher that holds nothing for the next engine."""

    is_closed = False

    def close(self):
        self.is_closed = True
