"""A bridge between network namespaces: `python bridge.py SOCKET HOST PORT` runs beside a server.

What comes to the UNIX socket, which has a place in the file system, goes to the TCP port.
"""

import asyncio
import sys


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what comes until it ends."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def main(path: str, host: str, port: int) -> None:
    """Connect both ways for every client; says so when it listens, and ends when it is killed."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection(host, port)
            await asyncio.gather(carry(reader, there[1]), carry(there[0], writer))
        except OSError:
            writer.close()  # nobody listens there

    server = await asyncio.start_unix_server(connect, path)
    print("listening", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
