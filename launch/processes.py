"""One rank as a process: started with what it must know, in a group of its own, never outliving the launcher."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import signal
import socket
import subprocess
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def allowed_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Processors that this process may use: its affinity, within the control group's quota (cpu.max of cgroup v2)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):  # no control groups, or of another version
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def listener() -> socket.socket:
    """A socket that listens on a free port of the loopback interface, for rank 0 to inherit: no port is guessed."""
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    found.listen(1024)
    return found


def environment(
    base: Mapping[str, str], rank: int, size: int, store: socket.socket, threads: int | None
) -> dict[str, str]:
    """What a rank finds in its environment. Variables of a torchrun around this launcher would say otherwise."""
    env = {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}
    env.update(
        COLLECTIVES_LAUNCH="1",
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.getsockname()[1]),
    )
    env.pop("COLLECTIVES_STORE_FD", None)
    if rank == 0:
        env["COLLECTIVES_STORE_FD"] = str(store.fileno())
    if threads is not None:
        env.setdefault("OMP_NUM_THREADS", str(threads))
    env.setdefault("PYTHONUNBUFFERED", "1")  # a pipe would hold lines back
    return env


@dataclass
class Rank:
    """A started rank. ``status`` is its exit code, negative for a signal, None while it runs."""

    number: int
    process: subprocess.Popen[bytes]
    pidfd: int
    stdout: int
    stderr: int
    status: int | None = None
    ended_by_us: bool = False
    failed_at: float = math.inf  # when its death or the start of its last traceback was seen
    traceback: list[bytes] = field(default_factory=list)  # held back
    shown: list[bytes] = field(default_factory=list)  # the last one that was printed after all

    def peek(self) -> int | None:
        """Note the exit status, but leave the zombie: its process group stays ours until ``reap``."""
        if self.status is None:
            found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                killed = found.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                self.status = -found.si_status if killed else found.si_status
        return self.status

    def signal(self, number: int) -> None:
        """Send a signal to the rank's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def reap(self) -> None:
        """Kill what is left of the group, and collect the rank itself."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        os.close(self.pidfd)


def start(
    number: int, command: Sequence[str], env: Mapping[str, str], store: socket.socket, terminals: tuple[bool, bool]
) -> Rank:
    """Start rank ``number``. ``terminals``: whether its stdout and stderr shall be terminals, instead of pipes."""
    parent = os.getpid()

    def in_child() -> None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the launcher died before the line above
            os.kill(os.getpid(), signal.SIGKILL)

    stdout, child_stdout = _stream(terminals[0])
    stderr, child_stderr = _stream(terminals[1])
    # As under mpirun, rank 0 gets the input; a terminal's belongs to the launcher's session alone.
    inherits_input = number == 0 and not os.isatty(0)
    try:
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=None if inherits_input else subprocess.DEVNULL,
            stdout=child_stdout,
            stderr=child_stderr,
            pass_fds=(store.fileno(),) if number == 0 else (),
            start_new_session=True,
            preexec_fn=in_child,
        )
    finally:
        os.close(child_stdout)
        os.close(child_stderr)
    for fd in (stdout, stderr):
        os.set_blocking(fd, False)
    return Rank(number, process, os.pidfd_open(process.pid), stdout, stderr)


def _stream(terminal: bool) -> tuple[int, int]:
    """Our reading end and the child's writing end."""
    if not terminal:
        return os.pipe()
    ours, child = os.openpty()
    attributes = termios.tcgetattr(child)
    attributes[1] &= ~termios.OPOST  # the real terminal turns newlines into carriage return and newline
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(child, termios.TCSANOW, attributes)
    copy_window_size(ours)
    return ours, child


def copy_window_size(terminal: int) -> None:
    """Give a rank's terminal the size of the real one."""
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that ``kill_orphans`` finds them."""
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_orphans() -> None:
    """Kill and collect every remaining child, also those that left their rank's process group."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
            except OSError:  # it ended meanwhile
                continue
            if int(status.rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(entry.name))
    return found
