"""The parts of envlet that are pure, or as good as: framing, layouts, bundles, plans, states, captured output, the
documents.
"""

import json
import os
import threading
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from envlet_harness import TableResolver, group
from hypothesis import given
from hypothesis import strategies as st

from envlet import bundle, cgroups, errors, initproc, rpc, types
from envlet.cgroups import Cgroup, CgroupError
from envlet.config import NodeConfig
from envlet.errors import EnvletError
from envlet.execution import Capture, parse_report
from envlet.mounted import MountedPlans
from envlet.mounts import HIDDEN_CGROUP2, hybrid_unified, parse_mountinfo
from envlet.overlay import mount_options
from envlet.plans import RESOLVED_AT_ONCE, Plans
from envlet.ports import Fault, LayerRef, MountedPlan, ResolvedGroup
from envlet.processes import wait_exit
from envlet.runtime import read_log
from envlet.server import may_use
from envlet.states import FAILURES, TRANSITIONS, check_transition
from envlet.users import ROOT, User, resolve_user
from tools import apidoc

# Framing


@given(st.lists(st.binary(min_size=1).filter(lambda line: b"\n" not in line and line.strip())), st.integers(1, 7))
def test_lines_come_whole_however_they_are_cut(lines: list[bytes], size: int) -> None:
    stream = b"".join(line + b"\n" for line in lines) + b"rest"
    decoder = rpc.LineDecoder()
    found = [line for at in range(0, len(stream), size) for line in decoder.feed(stream[at : at + size])]
    assert found == lines
    assert decoder.feed(b"\n") == [b"rest"]


def test_a_line_without_end_is_refused_at_its_bound() -> None:
    decoder = rpc.LineDecoder(max_bytes=10)
    assert decoder.feed(b"x" * 10) == []
    with pytest.raises(EnvletError, match="more than 10 bytes"):
        decoder.feed(b"x")


@given(st.integers(0, 2**53) | st.text(), st.text(), st.dictionaries(st.text(), st.integers() | st.text()))
def test_requests_and_answers_survive_the_wire(request_id: int | str, method: str, params: dict[str, object]) -> None:
    params = {key: value for key, value in params.items() if not isinstance(value, int) or abs(value) < 2**53}
    call = rpc.decode_request(rpc.encode_request(request_id, method, params))
    assert (call.request_id, call.method, msgspec.json.decode(call.params)) == (request_id, method, params)
    answer = rpc.decode_answer(rpc.encode_result(request_id, params))
    assert (answer.request_id, answer.error, msgspec.json.decode(answer.payload)) == (request_id, None, params)


@given(st.binary())
def test_any_line_is_a_request_or_a_clear_refusal(line: bytes) -> None:
    code = None
    try:
        rpc.decode_request(line)
    except EnvletError as error:
        code = error.code
    assert code in (None, errors.PARSE_ERROR, errors.INVALID_REQUEST)
    assert code is None or rpc.request_id_of(line) is None or code is errors.INVALID_REQUEST


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (b"{", "parse_error"),
        (b"\xff", "parse_error"),
        (b' [{"jsonrpc":"2.0"}]', "invalid_request"),
        (b'{"jsonrpc":"1.0","id":1,"method":"a"}', "invalid_request"),
        (b'{"jsonrpc":"2.0","method":"a"}', "invalid_request"),
        (b'{"jsonrpc":"2.0","id":null,"method":"a"}', "invalid_request"),
        (b"7", "invalid_request"),
    ],
)
def test_what_is_no_request(line: bytes, name: str) -> None:
    with pytest.raises(EnvletError) as caught:
        rpc.decode_request(line)
    assert caught.value.code.name == name


@pytest.mark.parametrize("code", errors.ALL_CODES, ids=lambda code: code.name)
def test_errors_arrive_as_they_were_sent(code: errors.ErrorCode) -> None:
    answer = rpc.decode_answer(rpc.encode_error(3, EnvletError(code, "why", {"id": "x"})))
    assert answer.error is not None
    assert (answer.error.code, answer.error.message) == (code, "why")
    assert answer.error.data == {"id": "x", "name": code.name, "retryable": code.retryable}


def test_error_codes_are_unique_and_explained() -> None:
    assert len(errors.BY_NUMBER) == len(errors.BY_NAME) == len(errors.ALL_CODES)
    assert all(code.meaning.endswith(".") and code.name.islower() for code in errors.ALL_CODES)


@pytest.mark.parametrize("field", ["id", "cpu", "workdir", "env", "init"])
def test_parameters_are_checked(field: str) -> None:
    wrong = {"id": "Über", "cpu": 0, "workdir": "relative", "env": {"A=B": "x"}, "init": ["nul\0"]}
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.json.decode(json.dumps({"groups": ["a"], field: wrong[field]}), type=types.CreateRequest)


# The documents


@pytest.mark.parametrize(("name", "text"), [(f"{name}.md", make()) for name, make in apidoc.DOCUMENTS.items()])
def test_the_documents_are_current(name: str, text: str) -> None:
    path = Path(apidoc.__file__).parent.parent / "docs" / name
    assert path.read_text() == text, f"run `python -m tools.apidoc {name.removesuffix('.md')} > docs/{name}`"


def test_the_api_document_names_every_method_field_and_error() -> None:
    text = apidoc.api_document()
    for method in types.METHODS.values():
        assert f"## {method.name}\n" in text
        for field in (*method.request.__struct_fields__, *method.result.__struct_fields__):
            assert f"| `{field}` |" in text
    assert all(f"| {code.number} | `{code.name}` |" in text for code in errors.ALL_CODES)


# Control groups

V1 = """22 27 0:21 / /proc rw - proc proc rw
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
37 31 0:34 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
38 31 0:35 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
"""
V1_CONTROLLERS = (
    "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t1\t1\t1\ncpuacct\t1\t1\t1\nmemory\t4\t7\t1\npids\t5\t1\t1\nfreezer\t6\t1\t1\n"
)
V2 = "24 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V2_CONTROLLERS = (
    "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpuset\t0\t1\t1\ncpu\t0\t90\t1\nmemory\t0\t90\t1\npids\t0\t90\t1\nhugetlb\t0\t1\t0\n"
)
UNIFIED = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
HIDDEN = f"50 31 0:60 / /sys/fs/cgroup/unified rw - tmpfs {HIDDEN_CGROUP2} rw\n"


def test_layouts_are_recognised(tmp_path: Path) -> None:
    v1 = cgroups.detect(V1, V1_CONTROLLERS)
    assert (v1.kind, v1.litter) == ("v1", None)
    assert v1.having("cpu") == v1.having("cpuacct")
    memory = v1.having("memory")
    assert memory is not None
    assert (memory.version, memory.path) == (1, Path("/sys/fs/cgroup/memory"))
    assert v1.having("cpuset") is None
    v2 = cgroups.detect(V2, V2_CONTROLLERS, tmp_path)
    assert v2.kind == "v2"
    assert v2.hierarchies == (
        cgroups.Hierarchy(2, tmp_path / "sys/fs/cgroup", frozenset(("cpuset", "cpu", "memory", "pids"))),
    )
    hybrid = cgroups.detect(V1 + UNIFIED, V1_CONTROLLERS)
    assert (hybrid.kind, len(hybrid.hierarchies)) == ("hybrid", 6)
    hidden = cgroups.detect(V1 + UNIFIED + HIDDEN, V1_CONTROLLERS)
    assert (hidden.kind, len(hidden.hierarchies)) == ("hybrid", 5)
    assert hidden.litter == Path("/sys/fs/cgroup/unified")
    with pytest.raises(CgroupError, match="no cgroup file system"):
        cgroups.detect("", V1_CONTROLLERS)


def test_a_version_2_tree_says_itself_what_it_has(tmp_path: Path) -> None:
    """/proc/cgroups may name less (memory is not in version 1 any more) or more (net_cls is in version 1 only)."""
    tree = tmp_path / "sys/fs/cgroup"
    tree.mkdir(parents=True)
    (tree / "cgroup.controllers").write_text("cpu memory pids\n")
    text = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t0\t9\t1\npids\t0\t9\t1\nnet_cls\t0\t1\t1\n"
    found = cgroups.detect(V2, text, tmp_path)
    assert found.hierarchies == (cgroups.Hierarchy(2, tree, frozenset(("cpu", "memory", "pids"))),)


def test_the_unified_mount_of_a_hybrid_host_is_found_and_only_that() -> None:
    assert hybrid_unified(parse_mountinfo(V1 + UNIFIED)) == "/sys/fs/cgroup/unified"
    assert hybrid_unified(parse_mountinfo(V1 + UNIFIED + HIDDEN)) is None
    assert hybrid_unified(parse_mountinfo(V1)) is None
    assert hybrid_unified(parse_mountinfo(V2)) is None


def test_mountinfo_escapes() -> None:
    mount = parse_mountinfo("1 2 0:3 / /a\\040b\\134c rw shared:1 - ext4 /dev/x\\011y rw,k\n")[0]
    assert (mount.target, mount.source, mount.options) == ("/a b\\c", "/dev/x\ty", frozenset(("rw", "k")))
    with pytest.raises(ValueError, match="6 fields"):
        parse_mountinfo("nonsense\n")


@pytest.mark.parametrize("path", ["", "/", "/one", "one/two", "/a/../b", "/a//b"])
def test_a_dangerous_control_group_path_is_never_accepted(path: str) -> None:
    with pytest.raises(CgroupError):
        Cgroup(cgroups.detect(V2, V2_CONTROLLERS), path)
    spec = bundle.BundleSpec(Path("/r"), "h", path, Path("/i"), "/", (), 1024)
    if len([part for part in path.split("/") if part]) < 2 or not path.startswith("/"):
        with pytest.raises(ValueError, match="control group path"):
            bundle.runtime_config(spec)


@pytest.mark.parametrize(
    ("text", "member"),
    [
        ("0::/weenv/e1\n", "e1"),
        ("4:memory:/daemon/weenv/e2/below\n1:cpu:/\n", "e2"),
        ("0::/weenvother/e1\n", None),
        ("0::/weenv\n", None),
        ("", None),
    ],
)
def test_the_environment_of_a_process(text: str, member: str | None) -> None:
    assert cgroups.group_member(text, "/weenv") == member


class FakeV2:
    """Directories that look like a version 2 tree, as far as files written and read go."""

    def __init__(self, root: Path) -> None:
        self.root = root / "sys/fs/cgroup"
        self.layout = cgroups.detect(V2, V2_CONTROLLERS, root)
        for directory in (self.root, self.root / "weenv"):
            directory.mkdir(parents=True)
            (directory / "cgroup.controllers").write_text("cpuset cpu memory pids\n")
            (directory / "cgroup.subtree_control").write_text("memory\n")

    def fill(self, name: str, **files: str) -> Path:
        directory = self.root / "weenv" / name
        directory.mkdir(exist_ok=True)
        for file, text in files.items():
            (directory / file.replace("__", ".")).write_text(text)
        return directory


def test_version_2_limits_use_and_delegation(tmp_path: Path) -> None:
    fake = FakeV2(tmp_path)
    cgroup = Cgroup(fake.layout, "/weenv/e1")
    with pytest.raises(CgroupError, match=r"cpu\.max did not take"):  # a plain directory has no such files
        cgroup.create(1.5, 1 << 20, 10)
    assert (fake.root / "cgroup.subtree_control").read_text() == "+cpu +pids"
    directory = fake.fill("e1", cpu__max="", memory__max="", memory__swap__max="", pids__max="")
    with pytest.raises(CgroupError, match="exists already"):
        cgroup.create(1.5, 1 << 20, 10)
    cgroup.set_limits(1.5, 1 << 20, 10)
    values = [(directory / name).read_text() for name in ("cpu.max", "memory.max", "memory.swap.max", "pids.max")]
    assert values == ["75000 50000", "1048576", "0", "10"]
    fake.fill("e1", cpu__stat="usage_usec 12\nuser_usec 3\n", memory__current="5", memory__peak="9", pids__current="2")
    fake.fill("e1", memory__events="low 0\noom 1\noom_kill 3\n", cgroup__procs="", cgroup__kill="")
    assert cgroup.usage() == cgroups.Usage(12, 5, 9, 2, 3)


def test_version_2_kills_and_freezes_by_its_files(tmp_path: Path) -> None:
    fake = FakeV2(tmp_path)
    cgroup = Cgroup(fake.layout, "/weenv/e1")
    directory = fake.fill("e1", cgroup__procs="123456789\n", cgroup__kill="", cgroup__freeze="", cgroup__events="frozen 1\n")

    async def main() -> None:
        with pytest.raises(CgroupError, match=r"still has processes \[123456789\]"):
            await cgroup.kill(deadline_s=0)
        (directory / "cgroup.procs").write_text("")
        await cgroup.kill(deadline_s=0)
        await cgroup.freeze(True)
        with pytest.raises(CgroupError, match="was not thawed"):
            await cgroup.freeze(False, deadline_s=0)

    trio.run(main)
    assert (directory / "cgroup.freeze").read_text() == "0"


# Bundle, users, states


def test_a_bundle_gives_no_more_than_it_should() -> None:
    spec = bundle.BundleSpec(Path("/r"), "name", "/weenv/name", Path("/init"), "/project", ("A=b",), 4096)
    config = bundle.runtime_config(spec)
    assert config["process"]["noNewPrivileges"] is True
    assert config["process"]["args"] == [bundle.INIT_PATH, "init", "3"]
    assert "CAP_SYS_ADMIN" not in config["process"]["capabilities"]["bounding"]
    assert config["process"]["capabilities"]["ambient"] == []
    assert {one["type"] for one in config["linux"]["namespaces"]} == {"pid", "mount", "ipc", "uts", "network", "cgroup"}
    assert config["linux"]["cgroupsPath"] == "/weenv/name"
    mounts = {one["destination"]: one for one in config["mounts"]}
    assert "ro" in mounts["/sys"]["options"]
    assert mounts[bundle.INIT_PATH]["options"][:2] == ["bind", "ro"]
    assert list(mounts).index("/dev") < list(mounts).index(bundle.INIT_PATH)


def test_a_user_who_is_not_root_has_no_capabilities() -> None:
    process = bundle.process_config(["x"], ("A=b",), "/", User(5, 6, (7,), "/h"), terminal=True, open_files=10)
    assert process["capabilities"]["effective"] == process["capabilities"]["permitted"] == []
    assert process["user"] == {"uid": 5, "gid": 6, "additionalGids": [7]}
    assert process["env"] == ["A=b", "HOME=/h", "TERM=xterm"]


def test_later_variables_replace_earlier_ones() -> None:
    merged = bundle.merge_env([("A=1", "B=1"), ("A=2", "broken", "C=x=y")], {"B": "request"})
    assert merged == (f"PATH={bundle.DEFAULT_PATH}", "A=2", "B=request", "C=x=y")


PASSWD = "root:x:0:0::/root:/bin/sh\nbroken\nworker:x:1000:100::/home/w:/bin/sh\n"
GROUPS = "staff:x:50:worker,other\nwheel:x:10:\nstaff2:x:51:worker\n"


@pytest.mark.parametrize(
    ("text", "user"),
    [
        ("worker", User(1000, 100, (50, 51), "/home/w")),
        ("1000", User(1000, 100, (50, 51), "/home/w")),
        ("worker:wheel", User(1000, 10, (), "/home/w")),
        ("7", User(7, 0, (), "/")),
        ("7:8", User(7, 8, (), "/")),
        ("", ROOT),
    ],
)
def test_users_are_those_of_the_environment(text: str, user: User) -> None:
    assert resolve_user(text, PASSWD, GROUPS) == user


@pytest.mark.parametrize("text", ["nobody", "worker:nogroup", "-1", "4294967295", "٣"])
def test_users_that_are_not_there(text: str) -> None:
    with pytest.raises(EnvletError, match="use a number"):
        resolve_user(text, PASSWD, GROUPS)


def test_the_state_table_lets_everything_end_and_nothing_come_back() -> None:
    assert set(TRANSITIONS) == {"creating", "ready", "deleting", "deleted", *FAILURES}
    for state, following in TRANSITIONS.items():
        assert "creating" not in following
        assert state == "deleted" or "deleting" in following or state == "deleting"
    check_transition("creating", "ready")
    with pytest.raises(ValueError, match="from deleted to ready"):
        check_transition("deleted", "ready")


# Output and reports


@given(st.lists(st.binary(max_size=300)), st.integers(0, 500))
def test_captured_output_is_head_and_tail_within_the_bound(pieces: list[bytes], limit: int) -> None:
    capture = Capture(limit)
    for piece in pieces:
        capture.add(piece)
    kept, omitted = capture.value()
    whole = b"".join(pieces)
    assert len(kept) == min(limit, len(whole))
    assert len(kept) + omitted == len(whole)
    head = limit - limit // 2
    assert kept[:head] == whole[:head]
    assert not omitted or kept[head:] == (whole[-(limit // 2) :] if limit // 2 else b"")


def test_a_large_output_is_captured_in_little_memory() -> None:
    capture = Capture(100)
    for number in range(1000):
        capture.add(number.to_bytes(2, "big") * 5000)
    kept, omitted = capture.value()
    assert kept == bytes(50) + (999).to_bytes(2, "big") * 25
    assert omitted == 10_000_000 - 100
    assert len(capture._tail) < 200_000


@pytest.mark.parametrize(
    ("report", "parsed"),
    [
        (b"exit 3\n", (3, None, None)),
        (b"signal 15\n", (143, 15, None)),
        (b"exec 2\n", (127, None, "cannot execute 'prog': No such file or directory")),
        (b"exec 13\n", (126, None, "cannot execute 'prog': Permission denied")),
        (b"chdir 2\n", (126, None, "cannot change to the working directory '/w': No such file or directory")),
        (b"", None),
        (b"exit", None),
    ],
)
def test_reports_of_the_wrapper(report: bytes, parsed: object) -> None:
    assert parse_report(report, "prog", "/w") == parsed


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=50)), max_size=4), st.integers(1, 9))
def test_reports_of_pid_1_however_they_are_cut(commands: list[tuple[int, bytes]], size: int) -> None:
    stream = b"".join(b"command %d %d 1500 %d\n%s" % (index, code << 8, len(tail), tail) for index, (code, tail) in enumerate(commands))
    reports = initproc.Reports()
    stream += b"ready\n"
    for at in range(0, len(stream), size):
        reports.feed(stream[at : at + size])
    assert reports.ready
    assert [(one.exit_code, one.output_tail, one.wall_s) for one in reports.results] == [
        (code, tail.decode(errors="replace"), 0.0015) for code, tail in commands
    ]


@pytest.mark.parametrize("line", [b"hello\n", b"command 1 0 0 0\n", b"command 0 0 0 99999\n", b"command 0 x 0 0\n", b"x" * 5000])
def test_a_strange_pid_1_is_not_believed(line: bytes) -> None:
    with pytest.raises(initproc.ProtocolError):
        initproc.Reports().feed(line)


def test_runtime_messages_without_noise(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_log(log) == ""
    log.write_text('{"level":"warning","msg":"noise"}\n{"msg":"bad","level":"error"}\n{"msg":"bad","level":"error"}\nplain\n')
    assert read_log(log) == "bad; plain"


# Configuration and access


def test_overlay_options_are_escaped_and_bounded() -> None:
    options = mount_options(Path("/a:b,c\\d"), Path("/u,v"), Path("/w"))
    assert options.startswith("lowerdir=/a\\:b\\,c\\\\d,upperdir=/u\\,v,workdir=/w,index=off,")
    with pytest.raises(ValueError, match="4095 at most"):
        mount_options(Path("/" + "x" * 4090), Path("/u"), Path("/w"))


def test_a_configuration_that_cannot_work_is_refused() -> None:
    good = {"state_dir": Path("/s"), "run_dir": Path("/r"), "socket_path": Path("/r/api")}
    NodeConfig(**good)
    for change in ({"state_dir": Path("s")}, {"run_dir": Path("/" + "r" * 90)}, {"cgroup_parent": "/"}, {"cgroup_parent": "x"}):
        with pytest.raises(ValueError, match=r"received|shorter"):
            NodeConfig(**{**good, **change})


def test_the_smallest_quota_is_the_one_that_the_kernel_takes() -> None:
    assert types.CPU_MIN * cgroups.CPU_PERIOD_US == 1000
    for cpu in (0.01, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"cpu is 0\.02 to 4096 cores"):
            NodeConfig(state_dir=Path("/s"), run_dir=Path("/r"), socket_path=Path("/r/a"), cpu=cpu)


def test_who_may_use_the_socket() -> None:
    assert may_use(0, [0], own_uid=500, socket_gid=600)
    assert may_use(500, [500], own_uid=500, socket_gid=600)
    assert may_use(501, [501, 600], own_uid=500, socket_gid=600)
    assert not may_use(501, [501], own_uid=500, socket_gid=600)


# Plans


class Away(Exception):
    """The registry cannot be reached."""


def translate(error: Exception, reference: str) -> EnvletError | None:
    return EnvletError(errors.REGISTRY_UNAVAILABLE, reference) if isinstance(error, Away) else None


def test_digests_are_resolved_once_and_tags_each_time(tmp_path: Path) -> None:
    pinned = "base@sha256:" + "a" * 64
    resolver = TableResolver(**{"tag": group("tag"), pinned: group("pinned")})

    async def main() -> None:
        plans = Plans(resolver, tmp_path / "refs.json", translate)
        for _ in range(2):
            plan = await plans.resolve(["tag", pinned, "tag"], "execution")
        assert len(plan.layers) == 3
        assert sorted(resolver.asked) == sorted(["tag", "tag", pinned])
        resolver.groups = {"tag": Away(), "new": Away()}
        later = Plans(resolver, tmp_path / "refs.json", translate)
        assert (await later.resolve(["tag", pinned], "execution")).groups == plan.groups[:2]
        assert later.statistics()["registry_away"] == 1
        with pytest.raises(EnvletError, match="new"):
            await later.resolve(["tag", "new"], "execution")

    trio.run(main)


def test_a_registry_that_says_nothing_is_not_waited_for_when_the_reference_is_known(tmp_path: Path) -> None:
    """More at once than there are threads for it: nobody else's work waits, either."""
    silent = threading.Event()

    class Silent(TableResolver):
        def resolve(self, reference: str) -> ResolvedGroup:
            silent.wait()
            return super().resolve(reference)

    references = [f"tag{number}" for number in range(RESOLVED_AT_ONCE + 10)]

    async def main() -> None:
        resolver = TableResolver(**{reference: group(reference) for reference in references})
        await Plans(resolver, tmp_path / "refs.json", translate).resolve(references, "execution")
        plans = Plans(Silent(**resolver.groups), tmp_path / "refs.json", translate, patience_s=0.05)
        plan = await plans.resolve(references, "execution")
        assert [found.reference for found in plan.groups] == [group(reference).reference for reference in references]
        assert plans.statistics()["registry_away"] == len(references)
        silent.set()

    trio.run(main)


def test_the_cache_of_references_is_bounded_and_may_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "refs.json"
    path.write_text("{damaged")
    resolver = TableResolver(**{str(number): group(str(number)) for number in range(5)})

    async def main() -> None:
        plans = Plans(resolver, path, translate, max_references=3)
        for number in range(5):
            await plans.resolve([str(number)], "execution")
        assert plans.statistics()["known"] == 3
        assert plans.statistics()["evicted"] == 2
        assert list(json.loads(path.read_text())) == ["2", "3", "4"]

    trio.run(main)


def test_one_request_serves_all_who_ask_at_once_and_survives_the_first(tmp_path: Path) -> None:
    resolver = TableResolver(a=group("a"))

    async def main() -> None:
        plans = Plans(resolver, tmp_path / "refs.json", translate)
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(plans.resolve, ["a"], "execution")
        assert len(resolver.asked) == 1
        async with trio.open_nursery() as nursery:
            first = trio.CancelScope()

            async def impatient() -> None:
                with first:
                    await plans.resolve(["a"], "execution")

            nursery.start_soon(impatient)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(plans.resolve, ["a"], "execution")
            first.cancel()

    trio.run(main)


def test_a_plan_takes_from_the_topmost_group() -> None:
    resolver = TableResolver(
        low=group("low", workdir="/low", user="l", env=("A=1", "B=1")),
        high=group("high", "task", workdir="/high", env=("A=2",)),
    )

    async def main() -> None:
        plan = await Plans(resolver, Path("/nonexistent/refs"), translate).resolve(["low", "high"], "execution")
        assert (plan.workdir, plan.user) == ("/high", "l")

    with pytest.raises(FileNotFoundError):  # the state directory exists in a daemon
        trio.run(main)


class CountingDataPlane:
    def __init__(self) -> None:
        self.served: list[str] = []
        self.added = 0

    async def add_plan(self, layers: list[LayerRef], *, images: bool = False, stacked: bool = False) -> MountedPlan:
        await trio.lowlevel.checkpoint()
        self.added += 1
        self.served.append(layers[0].digest)
        return MountedPlan(layers[0].digest, Path("/"), 1, 1)

    async def remove_plan(self, plan_id: str) -> None:
        await trio.lowlevel.checkpoint()
        self.served.remove(plan_id)

    async def statistics(self) -> dict[str, object]:
        return {}

    def faults(self) -> "trio.MemoryReceiveChannel[Fault]":
        return trio.open_memory_channel[Fault](0)[1]


def test_plans_are_kept_while_used_and_a_few_beyond() -> None:
    async def main() -> None:
        data_plane = CountingDataPlane()
        plans = MountedPlans(data_plane, max_unused=1)  # type: ignore[arg-type]
        layers = {name: group(name).layers for name in ("a", "b", "c")}
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(plans.acquire, layers["a"])
        assert data_plane.added == 1
        for name in ("b", "c"):
            await plans.acquire(layers[name])
            await plans.release(layers[name])
        assert data_plane.served == [layers["a"][0].digest, layers["c"][0].digest]
        assert plans.statistics() == {"used": 1, "unused": 1, "unused_max": 1, "failed_removals": 0}
        for _ in range(3):
            await plans.release(layers["a"])
        await plans.close()
        assert data_plane.served == []

    trio.run(main)


def test_a_plan_whose_clients_went_away_is_known_when_it_is_there() -> None:
    """The data plane adds it all the same: it is one that nobody uses, and not one that nobody removes."""

    class SlowDataPlane(CountingDataPlane):
        def __init__(self) -> None:
            super().__init__()
            self.asked, self.may_answer = trio.Event(), trio.Event()

        async def add_plan(self, layers: list[LayerRef], *, images: bool = False, stacked: bool = False) -> MountedPlan:
            self.asked.set()
            await self.may_answer.wait()
            return await super().add_plan(layers)

    async def main() -> None:
        data_plane = SlowDataPlane()
        plans = MountedPlans(data_plane)  # type: ignore[arg-type]
        layers = group("a").layers
        async with trio.open_nursery() as nursery:
            nursery.start_soon(plans.acquire, layers)
            await data_plane.asked.wait()
            nursery.cancel_scope.cancel()
        data_plane.may_answer.set()
        await trio.testing.wait_all_tasks_blocked()
        assert (data_plane.added, plans.statistics()["unused"]) == (1, 1)
        await plans.acquire(layers)
        assert (data_plane.added, plans.statistics()["used"]) == (1, 1)
        await plans.release(layers)
        await plans.close()
        assert data_plane.served == []

    trio.run(main)


def test_descriptors_of_a_spawned_program_are_exactly_those_given(tmp_path: Path) -> None:
    from envlet import processes

    processes.seal_descriptors()

    async def main() -> None:
        out = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
        null = os.open("/dev/null", os.O_RDWR)
        assert await processes.run(["/bin/ls", "/proc/self/fd"], {0: null, 1: out, 2: out, 3: null}) == 0
        assert await processes.run(["/bin/sh", "-c", "kill -9 $$"], {0: null, 1: null, 2: null}) == -9
        for fd in (out, null):
            os.close(fd)

    trio.run(main)
    assert (tmp_path / "out").read_text().split() == ["0", "1", "2", "3", "4"]  # 4: the directory that ls reads


def test_several_tasks_may_wait_for_one_process() -> None:
    """The supervisor of an environment still waits for its pid 1 while a removal begins to."""

    async def main() -> None:
        process = await trio.lowlevel.open_process(["sleep", "100"])
        pidfd = os.pidfd_open(process.pid)
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(wait_exit, pidfd)
                await trio.testing.wait_all_tasks_blocked()
                process.kill()
        finally:
            os.close(pidfd)
            await process.wait()

    trio.run(main)
