"""Another user of the machine tries to get into a job that runs on it alone.

Whoever attacks has a network of his own together with the job, so that he hits nothing else on this machine: that takes root.
"""

import os
import shutil
import socket
import subprocess
import sys
import textwrap

import pytest

import kale_dist as kd
from kale_dist.errors import CellError
from kale_dist.worker.rank import peers

NOBODY = 65534
ANOTHER = "10.9.9.9"
"""Another address of the same machine."""

apart = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="needs root, to be another user in a network of its own",
)

ATTACK = f"""
import encodings.idna, fcntl, os, socket, struct, sys, time
import torch.distributed as dist
import kale_dist as kd
from kale_dist.errors import JobError

with socket.socket() as any_socket:
    # ip link set lo up; ip address add {ANOTHER}/32 dev lo
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 1))
    address = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton("{ANOTHER}"))
    fcntl.ioctl(any_socket, 0x8916, address)


def listeners():
    rows = [line.split() for line in open("/proc/net/tcp").read().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"]


def as_nobody(attack):
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.setgid({NOBODY})
        os.setuid({NOBODY})
        try:
            attack(lambda text: os.write(writer, text.encode() + b"\\n"))
        finally:
            os._exit(0)
    os.close(writer)
    return pid, os.fdopen(reader)


def attack_while_it_runs(attack, train):
    job = kd.launch(train, number_of_processes=2, detach=True)
    while str(job.status.state) != "running":
        time.sleep(0.1)
    _, found = as_nobody(attack)
    print(found.read())
    job.wait()
    print(job.status.state)
"""


def run_apart(script, state):
    """Run a script as root, with the functions of `ATTACK`, where nobody else is in the network; gives what it prints."""
    command = ["unshare", "--net", sys.executable, "-c", ATTACK + textwrap.dedent(script)]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "KALE_DIST_HOME": str(state)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def addresses_listened_on():
    """Of this rank, of the process that has forked it, and of its agent; and whether somebody listens at MASTER_PORT."""
    import pathlib

    parents = [os.getpid()]
    for _ in range(2):
        stat = pathlib.Path(f"/proc/{parents[-1]}/stat").read_text()
        parents.append(int(stat.rpartition(")")[2].split()[1]))
    inodes = set()
    for pid in parents:
        for path in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(str(path.readlink()).removeprefix("socket:[").rstrip("]"))
            except OSError:
                continue
    found = set()
    for name in ("tcp", "tcp6", "udp", "udp6"):
        rows = [line.split() for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]]
        found |= {row[1].split(":")[0] for row in rows if row[3] in ("0A", "07") and row[9] in inodes}
    with socket.socket() as probe:
        is_open = probe.connect_ex((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) == 0
    return found, is_open


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def test_nothing_listens_to_other_machines_in_no_attempt(tmp_path):
    def restarted(mark):
        import signal

        if os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        import torch.distributed as dist

        dist.barrier()
        return os.environ["TORCHELASTIC_RESTART_COUNT"], *addresses_listened_on()

    job = kd.launch(restarted, tmp_path / "mark", number_of_processes=2, max_restarts=1)
    count, addresses, is_open = job.result()
    assert count == "1"
    assert addresses
    assert addresses <= LOOPBACK
    assert not is_open


@pytest.mark.nightly
def test_live_ranks_listen_to_nobody_after_a_repair_and_a_restart():
    with kd.live(number_of_processes=2) as live:
        live.push(addresses_listened_on=addresses_listened_on)
        live.restart()
        live.push(addresses_listened_on=addresses_listened_on)
        with pytest.raises(CellError):
            live.run("import torch.distributed as dist\nif rank == 0: raise ValueError('one alone')\ndist.barrier()")
        live.run("import os, socket; dist.barrier(); found = addresses_listened_on()")
        for addresses, is_open in live.pull("found"):
            assert addresses
            assert addresses <= LOOPBACK
            assert not is_open


def test_an_interface_of_your_own_is_used_with_a_warning(monkeypatch):
    names = [name for _, name in socket.if_nameindex() if name.startswith(("eth", "en"))]
    if not names:
        pytest.skip("needs a network card")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names[0])
    job = kd.launch(os.getpid, number_of_processes=2)
    assert job.wait().state == "succeeded"
    (warning,) = job.status.warnings
    assert warning.startswith(f"GLOO_SOCKET_IFNAME={names[0]} lets more than this machine connect")


@pytest.mark.nightly
@apart
def test_another_user_finds_no_store_and_no_file_of_the_ranks(tmp_path):
    printed = run_apart(
        """
        def look(say):
            time.sleep(1)
            tried = 0
            for port in listeners():
                tried += 1
                try:
                    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False,
                                          timeout=__import__("datetime").timedelta(seconds=2))
                    say(f"got in: {store.num_keys()} keys")
                except Exception:
                    pass
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    if os.stat(f"/proc/{pid}").st_uid == 0 and os.listdir(f"/proc/{pid}/fd"):
                        say(f"got in: descriptors of {pid}")
                except OSError:
                    pass
            say(f"tried {tried > 0}")

        def train():
            dist.barrier()
            time.sleep(8)
            dist.barrier()

        attack_while_it_runs(look, train)
        """,
        tmp_path,
    )
    assert printed.split() == ["tried", "True", "succeeded"]


@apart
@pytest.mark.parametrize("source", ["127.0.0.1", pytest.param(ANOTHER, marks=pytest.mark.nightly)])
def test_another_user_takes_no_ranks_place_in_a_group(tmp_path, monkeypatch, source):
    monkeypatch.setenv("SOURCE", source)
    printed = run_apart(
        """
        def take_place(say):
            seen, kept, parent = set(), [], os.getppid()
            while os.getppid() == parent:
                for port in set(listeners()) - seen:
                    seen.add(port)
                    for number in range(8):
                        one = socket.socket()
                        kept.append(one)
                        one.bind((os.environ["SOURCE"], 0))
                        # What gloo takes for the connection of another rank: the number of a pair.
                        if not one.connect_ex(("127.0.0.1", port)):
                            one.sendall(struct.pack("<Q", number))
                for one in kept:
                    try:
                        if data := one.recv(1 << 16, socket.MSG_DONTWAIT):
                            say(f"got {data!r}")
                    except OSError:
                        pass

        def train():
            # As between ranks that are not equally fast: where the first one listens, somebody else may be first. Which of two ranks
            # listens is by chance.
            for _ in range(12):
                time.sleep(0.3 * dist.get_rank())
                group = dist.new_group([0, 1])
                dist.broadcast_object_list([{"secret": 1}] if dist.get_rank() == 0 else [None], src=0, group=group)

        pid, found = as_nobody(take_place)
        try:
            # On a busy machine the other rank may come first in all groups of a job.
            for _ in range(4):
                kd.launch(train, number_of_processes=2, timeout_s=60).result()
        except JobError as error:
            print(error)
        finally:
            os.kill(pid, 9)
        print("attacker:", found.read())
        """,
        tmp_path,
    )
    told, _, attacker = printed.partition("attacker:")
    assert "secret" not in attacker
    if not told:
        pytest.skip("it never got in")
    assert f"A process of another user of this machine (uid {NOBODY}) has connected to a rank" in told


@apart
def test_another_user_types_nothing_at_the_debugger_of_a_rank(tmp_path):
    printed = run_apart(
        """
        import json
        from kale_dist.job import interrupts, records
        from kale_dist.places import agent_client
        from kale_dist.wire import messages
        interrupts.has_person = lambda: True
        job = kd.launch(lambda: breakpoint() or "goes on", number_of_processes=1, detach=True, timeout_s=60)
        while not job.status.at_breakpoints:
            time.sleep(0.1)
        agent = records.read(job.name).agent_socket
        typed = messages.Typed(prompt=job.status.at_breakpoints[0].breakpoint.prompt, text="c")
        line = {"op": "send", "job": job.name, "rank": 0, "message": json.loads(messages.encode(typed))}
        print(as_nobody(lambda say: say(f"sent {agent_client.send(agent, line)}"))[1].read())
        time.sleep(3)
        print(len(job.status.at_breakpoints), job.status.state)
        agent_client.send(agent, line)  # of its own user
        print(job.result())
        """,
        tmp_path,
    )
    assert printed.startswith("sent")
    # Between the two, whoever waits for the result may be shown the prompt.
    assert "\n1 running\n" in printed
    assert printed.endswith("goes on\n")


def closes_ports():
    """Whether this kernel can close a port to all (CONFIG_TCP_MD5SIG)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peers.close_to_all(listener)
        with socket.socket() as one:
            one.settimeout(0.5)
            return one.connect_ex(listener.getsockname()) != 0


@apart
def test_another_user_cannot_connect_to_ranks_that_are_all_connected(tmp_path):
    if not closes_ports():
        pytest.skip("needs a kernel with CONFIG_TCP_MD5SIG")
    printed = run_apart(
        """
        import resource

        def flood(say):
            time.sleep(3)
            kept, ports = [], listeners()
            for port in ports * 300:
                one = socket.socket()
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", port))
                kept.append(one)
            time.sleep(2)
            got_in = 0
            for one in kept:
                try:
                    one.getpeername()
                    got_in += 1
                except OSError:
                    pass
            say(f"tried {len(kept) > 0}, got in {got_in}")

        def train():
            # A group of your code's own is closed, too.
            group = dist.new_group([0, 1])
            dist.barrier(group)
            time.sleep(8)
            dist.barrier(group)
            dist.barrier()

        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        attack_while_it_runs(flood, train)
        """,
        tmp_path,
    )
    assert printed.splitlines()[0] == "tried True, got in 0"
    assert printed.split()[-1] == "succeeded"
