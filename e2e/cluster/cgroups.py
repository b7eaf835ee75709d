"""The cgroup that holds the cluster's pods: made before the kubelet starts, removed after the node has ended.

Works on both layouts: version 1 has one tree per controller below /sys/fs/cgroup, version 2 has one tree for all.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from .host import CGROUPS, cgroup_version
from .shell import Failure, wait_until

# What the kubelet demands of a cgroup that it is to manage, as far as the kernel has it.
CONTROLLERS = ("cpuset", "cpu", "memory", "hugetlb", "pids")


def trees(root: Path = CGROUPS) -> list[Path]:
    """The top of each tree that pods' cgroups are made in."""
    if cgroup_version(root) == 2:
        return [root]
    return sorted(
        entry for entry in root.iterdir() if entry.is_dir() and not entry.is_symlink() and (entry / "tasks").exists()
    )


def make(name: str, root: Path = CGROUPS) -> None:
    """Makes the cgroup `name` in every tree. Raises Failure where the machine does not allow it."""
    try:
        if cgroup_version(root) == 2:
            _delegate(root)
            (root / name).mkdir(exist_ok=True)
            _delegate(root / name)
            return
        for tree in trees(root):
            (tree / name).mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):  # born empty, and nothing can run in it until they are set
                if (tree / file).exists() and not (tree / name / file).read_text().strip():
                    (tree / name / file).write_text((tree / file).read_text())
    except OSError as error:
        raise Failure(
            f"cannot make the cgroup {name} below {root}: {error}. Pods need one: run on a machine that allows it"
        ) from error


def _delegate(group: Path) -> None:
    """Version 2: hands the controllers of `group` down to its children.

    Refused (EBUSY) where processes sit in `group` itself and it is not the real root, as in the root of a container's
    own cgroup namespace: they move to a child first.
    """
    available = (group / "cgroup.controllers").read_text().split()
    handed_down = (group / "cgroup.subtree_control").read_text().split()
    for controller in CONTROLLERS:
        if controller in available and controller not in handed_down:
            try:
                (group / "cgroup.subtree_control").write_text(f"+{controller}")
            except OSError:
                _move_processes(group, group / "init")
                (group / "cgroup.subtree_control").write_text(f"+{controller}")


def _move_processes(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for pid in (source / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):  # ended meanwhile, or a kernel thread
            (target / "cgroup.procs").write_text(pid)


def remove(name: str, root: Path = CGROUPS) -> None:
    """Removes the cgroup and all below it, deepest first. Waits, because a killed process leaves its cgroup late."""
    # runc makes it in a hybrid machine's unified tree as well, which is none of ours.
    groups = [tree / name for tree in (root, *root.iterdir()) if (tree / name).is_dir() and not tree.is_symlink()]

    def gone() -> bool:
        for group in groups:
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        return not any(group.exists() for group in groups)

    wait_until(f"the pods' cgroups ({name}) to empty", gone, 20, hint="a process of a pod may still run")
