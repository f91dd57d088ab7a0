"""A SLURM cluster of two nodes on this machine, with its configuration, key and ports in one folder."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from required import unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol", "sinfo", "squeue", "scancel")
SBIN = ":/usr/sbin:/usr/local/sbin"  # daemons are seldom on a user's path
# Names that lead here on any machine: 127.0.0.1 and 127.0.0.2, which the resolver reads in hexadecimal too. (With
# several slurmd on one machine no node may have the machine's own name, nor localhost, which SLURM takes for it.)
NODES = ("0x7f000001", "0x7f000002")
# No accounting, no cgroups, no limits: all that a cluster needs for starting processes.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """The daemons; `environment` leads SLURM's programs to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = os.environ["PATH"] + SBIN
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all daemons and wait for the nodes; skips the test where that cannot be."""
        missing = [name for name in NEEDED if shutil.which(name, path=self.path) is None]
        if missing:
            unavailable("slurm", f"not installed: {', '.join(missing)}")
        self._write()
        at = self.folder / "munge"
        self._daemon("munged", "--foreground", "--force", f"--key-file={at}.key", f"--socket={at}.socket",
                     f"--pid-file={at}.pid", f"--log-file={at}.log", f"--seed-file={at}.seed")  # fmt: skip
        self._daemon("slurmctld", "-D", "-i")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        deadline = time.monotonic() + 30
        states: list[str] = []
        while states != ["idle", "idle"]:
            time.sleep(0.5)
            if not self._run() or time.monotonic() > deadline:
                log = " / ".join(line for file in self.folder.glob("*.out") for line in _tail(file))
                unavailable("slurm", f"the daemons do not start: {log}")
            states = self._ask("sinfo", "--noheader", "--Node", "--format", "%T")

    def stop(self) -> None:
        """Cancel all jobs and end all daemons."""
        deadline = time.monotonic() + 15
        if self._run():
            self._ask("scancel", "--user", getpass.getuser())
        while self._run() and self._ask("squeue", "--noheader") and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self.daemons):
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
        for daemon in self.daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()

    def _run(self) -> bool:
        return bool(self.daemons) and all(daemon.poll() is None for daemon in self.daemons)

    def _write(self) -> None:
        (self.folder / "state").mkdir()
        for node in NODES:
            (self.folder / node).mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        text = CONFIGURATION.format(
            host=socket.gethostname(), user=getpass.getuser(), folder=self.folder, ports=_ports(3), nodes=NODES
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.{len(self.daemons)}.out").open("wb") as log:
            environment = {**os.environ, **self.environment, "PATH": self.path}
            program = shutil.which(command[0], path=self.path) or command[0]
            daemon = subprocess.Popen(
                [program, *command[1:]], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.daemons.append(daemon)

    def _ask(self, *command: str) -> list[str]:
        environment = {**os.environ, **self.environment, "PATH": self.path}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
        return done.stdout.split()


def _ports(number: int) -> Sequence[int]:
    probes = [socket.socket() for _ in range(number)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _tail(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines()[-2:]
