"""The daemon with the real runtime, control groups and overlay, over an unpacked busybox root. Each test ends with
nothing left.
"""

import base64
import contextlib
import json
import os
import signal
import socket
import tarfile
import tempfile
import threading
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from envlet_harness import Node, make_root, with_node

from envlet.client import Client
from envlet.errors import EnvletError
from envlet.ports import Fault
from envlet.types import ExecRequest, ExecResult


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("lower") / "root")


def run(root: Path, work: Any, **config: Any) -> None:
    """`work` with a client of a fresh node."""

    async def test(node: Node) -> None:
        await node.call(work)

    with_node(root, test, **config)


def shell(client: Client, environment_id: str, script: str, **options: Any) -> ExecResult:
    return client.exec(environment_id, ["sh", "-c", script], **options)


def diff_names(client: Client, environment_id: str) -> list[str]:
    with tempfile.TemporaryFile() as file:
        client.diff(environment_id, file.fileno())
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:
            return archive.getnames()


def failure(work: Any, *arguments: Any, **options: Any) -> EnvletError:
    with pytest.raises(EnvletError) as caught:
        work(*arguments, **options)
    return caught.value


def test_what_the_first_reference_would_wait_for_is_done_before(root: Path) -> None:
    async def test(node: Node) -> None:
        assert await trio.to_thread.run_sync(node.resolver.prepared.wait, 60)
        assert node.resolver.asked == []

    with_node(root, test)


def test_from_groups_to_a_removed_environment(root: Path) -> None:
    def work(client: Client) -> None:
        made = client.create(["base", "task"], init=["echo mutated > data", "echo done; pwd"], env={"B": "request"}, labels={"k": "v"})
        assert (made.state, made.role, made.workdir, made.labels) == ("ready", "execution", "/project", {"k": "v"})
        assert [(one.exit_code, one.output_tail) for one in made.init] == [(0, ""), (0, "done\n/project\n")]
        assert made.timings.total_s >= made.timings.runtime_s > 0
        result = shell(client, made.id, "cat data; echo $A $B $LANG; pwd; id -u; cat /proc/1/comm; hostname; echo err >&2; exit 7")
        assert result.exit_code == 7
        assert result.stdout.decode() == f"mutated\ntask request C.UTF-8\n/project\n0\n.weenv-init\n{made.id}\n"
        assert result.stderr == b"err\n"
        assert client.get(made.id).usage["pids"] == 1
        assert diff_names(client, made.id) == [".", "project", "project/data"]
        client.delete(made.id)
        assert client.get(made.id).state == "deleted"
        assert client.list() == []
        assert [info.id for info in client.list(all=True)] == [made.id]
        client.delete(made.id)
        assert failure(client.exec, made.id, ["true"]).code.name == "wrong_state"
        assert failure(client.get, "unknown").code.name == "not_found"

    run(root, work)


def test_exit_codes_are_those_of_the_command(root: Path) -> None:
    def work(client: Client) -> None:
        made = client.create(["base"])
        assert client.exec(made.id, ["sh", "-c", "kill -TERM $$"]).exit_code == 143
        missing = client.exec(made.id, ["no-such-program"])
        assert (missing.exit_code, missing.failure) == (127, "cannot execute 'no-such-program': No such file or directory")
        refused = client.exec(made.id, ["/etc/passwd"])
        assert (refused.exit_code, refused.failure) == (126, "cannot execute '/etc/passwd': Permission denied")
        nowhere = client.exec(made.id, ["true"], workdir="/no/where")
        assert nowhere.exit_code == 126
        assert nowhere.failure == "cannot change to the working directory '/no/where': No such file or directory"
        assert client.exec(made.id, ["cat"]).exit_code == 0, "stdin is empty"

    run(root, work)


def test_isolation(root: Path) -> None:
    def work(client: Client) -> None:
        made = client.create(["base"], init=["true secret-of-the-mutation"], cpu=0.5, memory_bytes=64 << 20, pids=50)
        assert shell(client, made.id, "cat /proc/1/cmdline /proc/1/environ").stdout.count(b"secret") == 0
        assert shell(client, made.id, "ls /proc/1/fd").stdout == b"0\n1\n2\n"
        assert shell(client, made.id, "ls /sys/class/net").stdout == b"lo\n"
        assert shell(client, made.id, "ping -c1 -W1 127.0.0.1 >/dev/null && ping -c1 -W1 localhost > /dev/null").exit_code == 0
        assert shell(client, made.id, "mount -t tmpfs x /tmp").exit_code != 0
        assert shell(client, made.id, "echo 1 > /proc/sys/kernel/hostname").exit_code != 0
        assert shell(client, made.id, "grep NoNewPrivs /proc/self/status").stdout == b"NoNewPrivs:\t1\n"
        assert shell(client, made.id, "for i in $(seq 80); do sleep 9 & done; echo ok").stdout != b"ok\n"

    run(root, work)


def test_users(root: Path) -> None:
    def work(client: Client) -> None:
        made = client.create(["base", "user"], init=["id -u > /tmp/init"])
        assert shell(client, made.id, "cat /tmp/init; id; echo $HOME").stdout == (
            b"0\nuid=1000(worker) gid=1000(worker) groups=2000(extra)\n/home/worker\n"
        )
        assert shell(client, made.id, "id -u; id -g", user="12:34").stdout == b"12\n34\n"
        assert failure(client.exec, made.id, ["id"], user="nobody-here").code.name == "invalid_params"
        timed = client.exec(made.id, ["sleep", "100"], timeout_s=0.2)
        assert (timed.timed_out, timed.exit_code) == (True, 137)

    run(root, work)


def test_a_timeout_kills_what_daemonised_and_nothing_else(root: Path) -> None:
    def work(client: Client) -> None:
        made = client.create(["base"])
        assert shell(client, made.id, "sleep 1000 & echo started").stdout == b"started\n", "a background process is not waited for"
        script = "(setsid sh -c 'sleep 2000 & sleep 2001' &) ; sleep 2002"
        result = shell(client, made.id, script, timeout_s=0.5)
        assert result.timed_out
        assert result.exit_code == 137
        running = shell(client, made.id, "ps -o args").stdout.decode()
        assert "sleep 1000" in running
        assert "sleep 200" not in running

    run(root, work)


def test_output_goes_to_the_client_or_is_captured_within_its_bound(root: Path) -> None:
    def work(client: Client) -> None:
        made = client.create(["base"])
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out:
            given.write(b"input\n" * 100_000)
            given.seek(0)
            result = client.exec(made.id, ["sh", "-c", "cat; echo err >&2"], stdio=[given.fileno(), out.fileno()])
            assert (result.stdout, result.stderr) == (b"", b"err\n")
            out.seek(0)
            assert out.read() == b"input\n" * 100_000
        result = shell(client, made.id, "echo head; head -c 3000000 /dev/zero; echo; echo tail", output_limit_bytes=100)
        assert result.stdout.startswith(b"head\n")
        assert result.stdout.endswith(b"\ntail\n")
        assert len(result.stdout) == 100
        assert result.stdout_omitted_bytes == 3_000_000 + 11 - 100

    run(root, work)


def test_a_terminal(root: Path) -> None:
    def work(client: Client) -> None:
        made = client.create(["base"])
        seen = bytearray()

        def copy(master: int) -> None:
            with open(master, "r+b", buffering=0) as terminal:
                terminal.write(b"tty; echo $TERM; exit 3\n")
                while True:
                    try:
                        data = terminal.read(4096)
                    except OSError:  # the other end is closed
                        return
                    if not data:
                        return
                    seen.extend(data)

        threads: list[threading.Thread] = []

        def on_terminal(master: int) -> None:
            threads.append(threading.Thread(target=copy, args=(master,)))
            threads[0].start()

        assert client.exec(made.id, ["sh"], on_terminal=on_terminal).exit_code == 3
        threads[0].join()
        assert b"/dev/pts/0\r\nxterm\r\n" in seen
        both = ExecRequest(id=made.id, argv=["true"], tty=True, descriptors=1)
        error = failure(client.call, "env.exec", both, ExecResult, [0])
        assert error.code.name == "descriptors"

    run(root, work)


def test_a_diff_makes_an_evaluation_environment_equal(root: Path) -> None:
    script = """
        rm -r sub; mkdir sub; echo new > sub/three; echo changed >> data; ln data /tmp/hard; ln -s data soft
        mkdir -p deep/er; touch -d '2001-02-03 04:05:06' deep; chmod 4755 /tmp/hard; rm /etc/group
    """
    skipped = " ".join(f"-path ./{name} -prune -o" for name in ("dev", "proc", "sys"))
    listing = f"cd /; find . -xdev {skipped} -print0 | sort -z | xargs -0 stat -c '%n %f %u %g %Y %h %s'"

    def work(client: Client) -> None:
        first = client.create(["base", "task"], init=[script])
        with tempfile.TemporaryFile() as tar:
            result = client.diff(first.id, tar.fileno())
            assert result.whiteouts == 2
            tar.seek(0)
            second = client.create(["base", "task", "judge"], role="evaluation", apply_fd=tar.fileno())
        assert (
            shell(client, second.id, "cat data sub/* soft /tmp/hard; ls sub").stdout
            == shell(client, first.id, "cat data sub/* soft /tmp/hard; ls sub").stdout
        )
        before, after = (shell(client, one.id, listing).stdout.decode().splitlines() for one in (first, second))
        assert [line for line in before if line not in after] == []
        assert len(before) == len(after)
        assert f"./etc/hosts 81a4 0 0 {int(root.stat().st_mtime)} 1" in "\n".join(before)
        shell(client, first.id, "echo x > /tmp/.wh.bad")
        with tempfile.TemporaryFile() as tar:
            assert failure(client.diff, first.id, tar.fileno()).code.name == "diff_failed"
        with tempfile.TemporaryFile() as tar:
            tar.write(b"no tar at all" * 100)
            tar.seek(0)
            assert failure(client.create, ["base"], apply_fd=tar.fileno()).code.name == "apply_refused"

    run(root, work)


def test_a_diff_into_a_pipe_that_nobody_reads_is_given_up(root: Path) -> None:
    async def test(node: Node) -> None:
        made = await node.call(lambda client: client.create(["base"], init=["head -c 3000000 /dev/zero > big"]))
        reading, writing = os.pipe()
        os.close(reading)
        error = await node.call(lambda client: failure(client.diff, made.id, writing))
        assert error.code.name == "diff_failed"
        reading, other = os.pipe()
        with trio.move_on_after(0.3):
            await node.call(lambda client: client.diff(made.id, other))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.call, lambda client: client.delete(made.id))
        for fd in (reading, writing, other):
            os.close(fd)

    with_node(root, test)


def test_a_failed_init_command_leaves_nothing_and_says_why(root: Path) -> None:
    def work(client: Client) -> None:
        error = failure(client.create, ["base"], init=["true", "echo about to fail; exit 9", "touch /never"])
        assert error.code.name == "init_failed"
        assert error.data["index"] == 1
        assert error.data["exit_code"] == 9
        assert error.data["output_tail"] == "about to fail\n"
        assert error.message == "init command 1 ('echo about to fail; exit 9') ended with status 9", "the output is said once"
        assert client.list(all=True) == []
        error = failure(client.create, ["base"], init=["sleep 100"], init_timeout_s=0.3)
        assert error.code.name == "timeout"
        error = failure(client.create, ["base"], init=["head -c 100000000 /dev/zero | tail"], memory_bytes=16 << 20)
        assert error.code.name == "init_failed"
        assert client.list(all=True) == []

    run(root, work, starting_slot_s=0.05)


def test_roles_and_references_are_refused_by_name(root: Path) -> None:
    def work(client: Client) -> None:
        error = failure(client.create, ["base", "judge"])
        assert error.code.name == "role_refused"
        assert "judge@sha256:" in error.message
        plan = client.resolve(["base", "judge"], role="evaluation")
        assert [group.role for group in plan.groups] == ["base", "evaluator"]
        assert plan.size_bytes == 200
        assert failure(client.create, []).code.name == "invalid_params"
        assert failure(client.create, ["base"], id="Not/valid").code.name == "invalid_params"
        client.create(["base"], id="mine")
        assert failure(client.create, ["base"], id="mine").code.name == "exists"
        client.create(["base"])
        assert failure(client.create, ["base"]).code.name == "capacity"

    run(root, work, environments_max=2)


def test_memory_that_is_not_enough_ends_the_environment_as_oom(root: Path) -> None:
    def work(client: Client) -> None:
        made = client.create(["base"], memory_bytes=24 << 20, init=["echo kept > kept"])
        error = failure(client.exec, made.id, ["sh", "-c", "exec tail /dev/zero"])
        assert error.code.name == "ended"
        assert error.data["state"] == "oom"
        info = client.get(made.id)
        assert info.state == "oom"
        assert "25165824 bytes" in (info.cause or "")
        assert "project/kept" in diff_names(client, made.id), "what it wrote can still be had"
        assert failure(client.exec, made.id, ["true"]).code.name == "wrong_state"
        client.delete(made.id)

    run(root, work)


def test_expiry_removes_everything_but_the_record(root: Path) -> None:
    def work(client: Client) -> None:
        made = client.create(["base"], ttl_s=0.4)
        assert made.expires_unix_s is not None
        error = failure(client.exec, made.id, ["sleep", "100"])
        assert error.data["state"] == "expired"
        while client.list():  # the removal runs on; a request is an event to wait for
            pass
        info = client.get(made.id)
        assert (info.state, info.cause) == ("expired", "its ttl_s of 0.4 is over")
        client.delete(made.id)

    run(root, work)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0199])
def test_a_quota_that_cannot_be_set_is_refused(root: Path, value: float) -> None:
    def work(client: Client) -> None:
        error = failure(client.create, ["base"], cpu=value)
        assert error.code.name == "invalid_params"
        assert "cpu" in error.message
        assert client.list(all=True) == []

    run(root, work)


def test_no_signal_from_inside_ends_the_environment(root: Path) -> None:
    def work(client: Client) -> None:
        script = "for s in HUP INT QUIT TERM USR1 USR2 CHLD KILL STOP; do kill -$s 1; done"
        made = client.create(["base"], init=[script])
        assert shell(client, made.id, script).exit_code == 0
        assert shell(client, made.id, "sleep 0 & ps -o pid,stat | grep '^ *1 '").stdout.split()[1][:1] == b"S"
        assert client.get(made.id).state == "ready"

    run(root, work)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_death_of_pid_1_is_noticed(root: Path, number: signal.Signals) -> None:
    async def test(node: Node) -> None:
        made = await node.call(lambda client: client.create(["base"]))
        (pid,) = node.daemon._live[made.id].cgroup.processes()

        def work(client: Client) -> None:
            threading.Timer(0, os.kill, (pid, number)).start()
            error = failure(client.exec, made.id, ["sleep", "100"])
            assert error.data["state"] == "killed"
            assert client.get(made.id).state == "killed"

        await node.call(work)

    with_node(root, test)


def test_a_fault_of_the_data_plane_marks_the_environment(root: Path) -> None:
    async def test(node: Node) -> None:
        made, other = [await node.call(lambda client: client.create(["base"])) for _ in range(2)]
        group = node.daemon._live[made.id].cgroup
        outcome: list[EnvletError] = []

        def fault(number: int, environment: str, error: str) -> Fault:
            where = f"4:memory:{node.config.cgroup_parent}/{environment}\n"
            return Fault(number=number, pid=2**22 - 1, cgroup=where, layer="sha256:aa", chunk=7, error=error)

        async def sleeper() -> None:
            outcome.append(await node.call(lambda client: failure(client.exec, made.id, ["sleep", "100"])))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleeper)
            while len(group.processes()) < 3:
                await trio.lowlevel.checkpoint()
            await node.data_plane.send_fault.send(fault(1, made.id, "digest mismatch"))
            await node.data_plane.send_fault.send(fault(2, "nobody-of-ours", "nobody"))
        assert outcome[0].data == {
            "id": made.id, "state": "faulted", "cause": "chunk 7 of layer sha256:aa could not be read: digest mismatch",
            "name": "ended", "retryable": False,
        }  # fmt: skip
        states = {info.id: info.state for info in await node.call(lambda client: client.list())}
        assert states == {made.id: "faulted", other.id: "ready"}
        statistics = (await node.call(lambda client: client.info())).statistics
        assert (statistics["faults"], statistics["faults_unassigned"]) == (2, 1)
        assert [fault.number for fault in node.data_plane.acknowledged] == [1, 2]

    with_node(root, test)


def test_the_end_of_the_data_plane_loses_its_environments(root: Path) -> None:
    async def test(node: Node) -> None:
        made = await node.call(lambda client: client.create(["base"]))
        node.data_plane.send_fault.close()
        await trio.testing.wait_all_tasks_blocked()
        info = await node.call(lambda client: client.get(made.id))
        assert info.state == "lost"
        out = os.open(os.devnull, os.O_WRONLY)
        error = await node.call(lambda client: failure(client.diff, made.id, out))
        os.close(out)
        assert error.code.name == "wrong_state"
        assert "is lost (the data plane ended" in error.message

    with_node(root, test)


def test_sixteen_at_once_and_two_clients_on_one_environment(root: Path) -> None:
    async def test(node: Node) -> None:
        made: list[str] = []

        async def one(number: int) -> None:
            def work(client: Client) -> str:
                info = client.create(["base", "task"], init=[f"echo {number} > number"])
                assert shell(client, info.id, "cat number").stdout == f"{number}\n".encode()
                return info.id

            made.append(await node.call(work))

        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(one, number)
        assert len(set(made)) == 16
        results: list[bytes] = []

        async def rendezvous(script: str) -> None:
            results.append((await node.call(lambda client: shell(client, made[0], script))).stdout)

        await node.call(lambda client: shell(client, made[0], "mkfifo /tmp/pipe"))
        async with trio.open_nursery() as nursery:  # each needs the other to run at the same time
            nursery.start_soon(rendezvous, "echo met > /tmp/pipe")
            nursery.start_soon(rendezvous, "cat /tmp/pipe")
        assert sorted(results) == [b"", b"met\n"]

    with_node(root, test)


def test_a_vanished_client_takes_only_its_own_with_it(root: Path) -> None:
    async def test(node: Node) -> None:
        kept = await node.call(lambda client: client.create(["base"]))

        def vanish(method: str, params: dict[str, Any]) -> socket.socket:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(os.fspath(node.config.socket_path))
            connection.sendall(json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode() + b"\n")
            return connection

        group = node.daemon._live[kept.id].cgroup
        running = vanish("env.exec", {"id": kept.id, "argv": ["sh", "-c", "sleep 100 & sleep 101"]})
        while len(group.processes()) < 4:
            await trio.lowlevel.checkpoint()
        running.close()
        while len(group.processes()) > 1:
            await trio.lowlevel.checkpoint()
        creating = vanish("env.create", {"groups": ["base"], "id": "halfway", "init": ["sleep 100"]})
        while "halfway" not in node.daemon._live or len(node.daemon._live["halfway"].cgroup.processes()) < 2:
            await trio.lowlevel.checkpoint()
        creating.close()
        while "halfway" in node.daemon._live:
            await trio.lowlevel.checkpoint()
        assert (await node.call(lambda client: client.exec(kept.id, ["true"]))).exit_code == 0

    with_node(root, test)


def test_what_a_client_says_wrong_is_answered(root: Path) -> None:
    async def test(node: Node) -> None:
        def talk(*lines: bytes) -> list[dict[str, Any]]:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(os.fspath(node.config.socket_path))
                answers = connection.makefile("rb")
                found = []
                for line in lines:
                    connection.sendall(line + b"\n")
                    found.append(json.loads(answers.readline()))
                return found

        answers = await trio.to_thread.run_sync(
            talk,
            b"not json",
            b"[]",
            b'{"jsonrpc":"2.0","id":"x","method":"env.fly"}',
            b'{"jsonrpc":"2.0","id":5,"method":"env.get","params":{"id":"a","typo":1}}',
            b'{"jsonrpc":"2.0","id":6,"method":"env.diff","params":{"id":"a"}}',
            b'{"jsonrpc":"2.0","id":7,"method":"node.info","params":{}}',
        )
        assert [answer["id"] for answer in answers] == [None, None, "x", 5, 6, 7]
        names = [answer["error"]["data"]["name"] for answer in answers[:5]]
        assert names == ["parse_error", "invalid_request", "method_not_found", "invalid_params", "descriptors"]
        assert answers[5]["result"]["environments_max"] == node.config.environments_max

    with_node(root, test)


def test_a_refused_request_with_descriptors_harms_no_other(root: Path) -> None:
    async def test(node: Node) -> None:
        made = await node.call(lambda client: client.create(["base"]))

        def line(number: int, method: str, **params: Any) -> bytes:
            return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode() + b"\n"

        def talk() -> None:
            with socket.socket(socket.AF_UNIX) as connection, tempfile.TemporaryFile() as first, tempfile.TemporaryFile() as second:
                connection.connect(os.fspath(node.config.socket_path))
                descriptors = [first.fileno()]
                common = {"id": made.id, "argv": ["cat"]}
                connection.sendall(line(1, "env.exec", id=made.id, argv=["sleep", "0.2"]))
                socket.send_fds(connection, [line(2, "env.exec", **common, workdir="relative", descriptors=1)], descriptors)
                socket.send_fds(connection, [line(3, "env.fly", descriptors=1)], descriptors)
                socket.send_fds(connection, [line(4, "env.diff", id="No Id")], descriptors)  # one descriptor is its default
                second.write(b"the right one")
                second.seek(0)
                socket.send_fds(connection, [line(5, "env.exec", **common, descriptors=1)], [second.fileno()])
                answers = connection.makefile("rb")
                found = {answer["id"]: answer for answer in (json.loads(answers.readline()) for _ in range(5))}
            names = [found[number]["error"]["data"]["name"] for number in (2, 3, 4)]
            assert names == ["invalid_params", "method_not_found", "invalid_params"]
            assert found[1]["result"]["exit_code"] == 0
            assert base64.b64decode(found[5]["result"]["stdout"]) == b"the right one"

        descriptors = len(os.listdir("/proc/self/fd"))
        await trio.to_thread.run_sync(talk)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 1, "received descriptors are closed; a thread may have opened one"

    with_node(root, test)


def test_a_client_that_leaves_after_its_error_is_no_defect(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(node: Node) -> None:
        def leave() -> None:
            with socket.socket(socket.AF_UNIX) as connection, tempfile.TemporaryFile() as file:
                connection.connect(os.fspath(node.config.socket_path))
                socket.send_fds(connection, [b"not json\n" * 100], [file.fileno()])

        for _ in range(20):
            await trio.to_thread.run_sync(leave)
        await node.call(lambda client: client.info())
        assert [record.message for record in caplog.records if record.exc_info] == []

    with_node(root, test)


def test_runc_serves_as_well(root: Path) -> None:
    def work(client: Client) -> None:
        made = client.create(["base"], init=["echo hi > /tmp/x"])
        assert shell(client, made.id, "cat /tmp/x; exit 4").exit_code == 4
        assert client.exec(made.id, ["sleep", "60"], timeout_s=0.2).timed_out
        assert client.exec(made.id, ["nope"]).exit_code == 127
        out = BytesIO()

        def on_terminal(master: int) -> None:
            """To the end: a terminal that is closed before hangs up on its command."""
            with open(master, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
                while data := terminal.read(100):
                    out.write(data)

        assert client.exec(made.id, ["tty"], on_terminal=on_terminal).exit_code == 0
        assert out.getvalue().startswith(b"/dev/")

    run(root, work, runtime="runc")
