"""Ends a backend whose server has gone, from outside the process.

Why        a call into Triton's stub (metrics, is_cancelled, responses) waits for the server, or for a lock in shared memory that
           the server held, and holds the interpreter's lock meanwhile. Once the server is killed it waits for ever, and no thread
           of this process can end it. The supervisor does, unless it was killed too or never was
How        a shell, child of the backend, looks at the backend's parent once a second. It is in the server's process group, so
           what kills that takes it along; it ignores the signals of a terminal; it costs 1 ms of CPU a second. When the backend
           has gone it ends and touches nothing: the supervisor starts the next server under the same prefix
Left over  `stop` leaves a `sleep` of one second at most
"""

from __future__ import annotations

import logging
import os
import subprocess

from runtime.serving.control import SHARED_MEMORY, own_prefix

log = logging.getLogger("forgeline.orphan")

NAME = "forgeline-watcher"  # in the command line, before the pids of backend and server and where the shared memory begins
_SCRIPT = r"""
trap '' INT TERM HUP
backend=$1 server=$2 regions=$3 begun=
while read -r line <"/proc/$backend/stat"; do
    set -- ${line##*) }  # state, parent, ..., start time
    case $1 in [ZX]) exit ;; esac
    [ "${begun:=${20}}" = "${20}" ] || exit  # another process of the same number
    if [ "$2" != "$server" ]; then
        kill -9 "$backend"
        [ -z "$regions" ] || rm -f "$regions"*
        exit
    fi
    sleep 1
done
"""


class OrphanWatcher:
    """Watches `backend`, child of `server`, from construction to `stop`."""

    def __init__(self, backend: int, server: int, prefix: str | None) -> None:
        """`prefix` of the server's shared memory, which goes with an orphan; None: it stays, other servers may use the name."""
        regions = str(SHARED_MEMORY / prefix) if prefix else ""
        command = ["/bin/sh", "-c", _SCRIPT, NAME, str(backend), str(server), regions]
        nowhere = subprocess.DEVNULL
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)
        except OSError as error:
            log.warning(
                "no watcher (%s): should the server be killed, this process (%d) may have to be killed by hand", error, backend
            )

    @classmethod
    def of_this_process(cls) -> OrphanWatcher:
        return cls(os.getpid(), os.getppid(), own_prefix())

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
