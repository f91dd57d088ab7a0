"""A SLURM cluster of two nodes on this machine, with its configuration, key and state in one folder."""

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

from support.required import unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol", "sinfo", "squeue", "scancel")
SBIN = ":/usr/sbin:/usr/local/sbin"  # daemons are seldom on a user's path
# 127.0.0.1 and 127.0.0.2 in hexadecimal, which resolve to this machine. With several slurmd on one machine, no node may
# be called localhost or have the machine's name, because SLURM treats both as the machine itself.
NODES = ("0x7f000001", "0x7f000002")
# The minimum for starting processes: no accounting, no cgroups, no limits.
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
    """The daemons of a cluster; SLURM's programs connect to them with the variables in `environment`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = os.environ["PATH"] + SBIN
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all daemons and wait for idle nodes; skip the test if SLURM is missing or cannot start."""
        missing = [name for name in NEEDED if shutil.which(name, path=self.path) is None]
        if missing:
            unavailable("slurm", f"not installed: {', '.join(missing)}")
        self._write_configuration()
        munge = self.folder / "munge"
        self._start_daemon("munged", "--foreground", "--force", f"--key-file={munge}.key", f"--socket={munge}.socket",
                     f"--pid-file={munge}.pid", f"--log-file={munge}.log", f"--seed-file={munge}.seed")  # fmt: skip
        self._start_daemon("slurmctld", "-D", "-i")
        for node in NODES:
            self._start_daemon("slurmd", "-D", "-N", node)
        deadline = time.monotonic() + 30
        states: list[str] = []
        while states != ["idle", "idle"]:
            time.sleep(0.5)
            if not self._is_running() or time.monotonic() > deadline:
                log = " / ".join(line for file in self.folder.glob("*.out") for line in _last_lines(file))
                unavailable("slurm", f"the daemons do not start: {log}")
            states = self._query("sinfo", "--noheader", "--Node", "--format", "%T")

    def stop(self) -> None:
        """Cancel all jobs and stop all daemons."""
        deadline = time.monotonic() + 15
        if self._is_running():
            self._query("scancel", "--user", getpass.getuser())
        while self._is_running() and self._query("squeue", "--noheader") and time.monotonic() < deadline:
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

    def _is_running(self) -> bool:
        return bool(self.daemons) and all(daemon.poll() is None for daemon in self.daemons)

    def _write_configuration(self) -> None:
        (self.folder / "state").mkdir()
        for node in NODES:
            (self.folder / node).mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        text = CONFIGURATION.format(
            host=socket.gethostname(),
            user=getpass.getuser(),
            folder=self.folder,
            ports=_find_free_ports(3),
            nodes=NODES,
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")

    def _start_daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.{len(self.daemons)}.out").open("wb") as log:
            environment = {**os.environ, **self.environment, "PATH": self.path}
            program = shutil.which(command[0], path=self.path) or command[0]
            daemon = subprocess.Popen(
                [program, *command[1:]], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.daemons.append(daemon)

    def _query(self, *command: str) -> list[str]:
        environment = {**os.environ, **self.environment, "PATH": self.path}
        try:
            completed = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return []
        return completed.stdout.split()


def _find_free_ports(number: int) -> Sequence[int]:
    probes = [socket.socket() for _ in range(number)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _last_lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines()[-2:]
