"""Room for ranks: what control groups leave, what processes may use, and what is said of it."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mpiddp.diagnosis.memory_room import Room, describe, here, memory_left
from mpiddp.findings import Finding

pytestmark = pytest.mark.once

GIB = 1 << 30
WIDE = Room("n0", 4, (30 * GIB, 30 * GIB), 100 * GIB, False, {})


def grades(found: "list[Finding]") -> "dict[str, str]":
    return {each.text: each.grade for each in found}


def test_enough() -> None:
    assert grades(describe([WIDE, WIDE])) == {
        "memory: there are 100 GiB for 4 ranks on n0": "ok",
        "/dev/shm: 30 GiB of 30 GiB free for 4 ranks on n0": "ok",
    }


def test_too_little_on_one_node() -> None:
    narrow = Room("n1", 2, (32 << 20, 64 << 20), GIB, True, {"ulimit -f": 1 << 20})
    assert grades(describe([WIDE, narrow, WIDE])) == {
        "memory: a limit of the container or job leaves 1 GiB for 2 ranks on n1": "warning",
        "/dev/shm: 32 MiB of 64 MiB free for 2 ranks on n1": "warning",
        "limit: ulimit -f of a rank on n1 allows a file, as shared memory is one, of 1 MiB": (
            "warning"
        ),
    }


def test_this_machine() -> None:
    room = here(1)
    stat = os.statvfs("/dev/shm")
    assert room.shm[1] == stat.f_blocks * stat.f_frsize
    assert 0 < room.free < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_limits_of_a_process() -> None:
    code = (
        "import resource; from mpiddp.diagnosis.memory_room import here, _used_addresses\n"
        "most = _used_addresses() + (1 << 30)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "print(sorted(here(1).limits))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    own = resource.getrlimit(resource.RLIMIT_DATA)[0]
    assert own == resource.RLIM_INFINITY, "this test is for a shell without limits"
    assert done.stdout == "['ulimit -f', 'ulimit -v']\n"


class TestControlGroups:
    def fill(self, folder: Path, limit: str, used: int, version: int) -> None:
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {GIB}\n")

    def test_version_2(self, tmp_path: Path) -> None:
        """The tightest on the way up counts; what files keep can be given back."""
        self.fill(tmp_path / "job", str(8 * GIB), 4 * GIB, 2)
        self.fill(tmp_path / "job" / "step", "max", 2 * GIB, 2)
        assert memory_left(tmp_path, "0::/job/step\n") == 5 * GIB
        assert memory_left(tmp_path, "0::/\n") is None
        self.fill(tmp_path / "job" / "step", str(2 * GIB), 2 * GIB, 2)
        assert memory_left(tmp_path, "0::/job/step\n") == GIB

    def test_version_1(self, tmp_path: Path) -> None:
        groups = "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n"
        self.fill(tmp_path / "memory" / "job", str(3 * GIB), 3 * GIB, 1)
        assert memory_left(tmp_path, groups) == GIB
        self.fill(tmp_path / "memory" / "job", str(0x7FFFFFFFFFFFF000), 3 * GIB, 1)
        assert memory_left(tmp_path, groups) is None

    def test_a_container_with_a_root_of_its_own(self, tmp_path: Path) -> None:
        """The path is of the host, and its group is what the container sees as the root."""
        self.fill(tmp_path, str(4 * GIB), 2 * GIB, 2)
        assert memory_left(tmp_path, "0::/docker/123\n") == 3 * GIB
