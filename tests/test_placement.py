"""Placement, crowds and health of peers: pure decisions, by their properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.node_report import _peers_line
from weefs import placement
from weefs.coalesce import Range
from weefs.core import ChunkIndex, LayerSlot, Miss
from weefs.crowd import CHILDREN, Crowd, bits_of
from weefs.peerconfig import PeersConfig, PeersRefused, check, may_open, own_name, read_token
from weefs.peerhealth import FAILURES, LEFT_OUT_S, LONGEST_PAUSE_S, LOST_RACES, SHORTEST_HEDGE_S, Answers, PeerHealth
from weefs.peering import pieces_of

LAYER = f"sha256:{'a' * 64}"
NAMES = st.lists(st.integers(1, 65535).map(lambda port: f"node:{port}"), min_size=1, max_size=12, unique=True)
GROUPS = st.integers(0, 1 << 20)


# owners


@given(NAMES, GROUPS, st.randoms())
def test_owners_are_the_same_for_everybody(names: list[str], group: int, random: object) -> None:
    shuffled = [*names]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    found = placement.owners(names, LAYER, group)
    assert found == placement.owners(shuffled, LAYER, group)
    assert len(found) == len(set(found)) == min(placement.OWNERS, len(names))
    assert set(found) <= set(names)


@given(NAMES, GROUPS, st.data())
def test_a_member_that_leaves_moves_only_its_groups(names: list[str], group: int, data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(names))
    before = placement.owners(names, LAYER, group)
    after = placement.owners([name for name in names if name != gone], LAYER, group)
    if gone not in before:
        assert after == before
    else:
        stayed = [owner for owner in before if owner != gone]
        assert after[: len(stayed)] == stayed
        assert len(set(after) - set(before)) <= 1


def test_groups_are_spread_evenly() -> None:
    names = [f"10.0.0.{i}:9465" for i in range(20)]
    first = dict.fromkeys(names, 0)
    for group in range(10_000):
        first[placement.owners(names, LAYER, group)[0]] += 1
    assert min(first.values()) > 380  # 500 each, standard deviation 22
    assert max(first.values()) < 620


@given(NAMES, NAMES, GROUPS)
def test_whoever_believes_in_which_members_nobody_waits_in_a_circle(one: list[str], other: list[str], group: int) -> None:
    """Each asks only who ranks before it: of itself as a member, by its own view."""
    for names in (one, other):
        for name in names:
            for asked in placement.places_to_ask(name, placement.owners(names, LAYER, group), LAYER, group):
                assert asked != name
                assert placement.before(asked, name, LAYER, group)
    for a in one:
        for b in other:
            assert placement.before(a, b, LAYER, group) + placement.before(b, a, LAYER, group) == (a != b)


@given(NAMES, GROUPS)
def test_only_the_first_owner_asks_no_peer(names: list[str], group: int) -> None:
    owners = placement.owners(names, LAYER, group)
    for rank, owner in enumerate(owners):
        assert placement.places_to_ask(owner, owners, LAYER, group) == owners[:rank]
    for name in set(names) - set(owners):
        assert sorted(placement.places_to_ask(name, owners, LAYER, group)) == sorted(owners)


def test_those_who_own_nothing_share_the_owners() -> None:
    names = [f"10.0.{i // 250}.{i % 250}:9465" for i in range(3000)]
    first: dict[str, int] = {}
    owners = placement.owners(names, LAYER, 7)
    for name in names:
        if places := placement.places_to_ask(name, owners, LAYER, 7):
            first[places[0]] = first.get(places[0], 0) + 1
    assert len(first) == placement.OWNERS
    assert min(first.values()) > 850


# pieces


@given(st.sets(st.integers(0, 100), min_size=1), st.integers(1, 40))
def test_pieces_are_consecutive_and_of_one_group(chunks: set[int], max_chunks: int) -> None:
    misses = [Miss(LayerSlot(1), ChunkIndex(chunk), chunk * 10, 10, 4096, chunk * 4096) for chunk in chunks]
    pieces = pieces_of(misses, max_chunks * 4096)
    assert sorted(miss.chunk for piece in pieces for miss in piece) == sorted(chunks)
    for piece in pieces:
        numbers = [miss.chunk for miss in piece]
        assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]
        assert len({placement.group_of(number) for number in numbers}) == 1
        assert len(piece) <= max_chunks
    assert Range(LayerSlot(1), pieces[0]).misses == pieces[0]


# crowds


def test_whoever_nobody_can_be_found_for_is_sent_it() -> None:
    """Others were sent parts of what it wants: nobody has, or will have, all of it. Whoever wants the same then is sent on to it."""
    crowd = Crowd()
    for i in range(CHILDREN):
        assert crowd.admit(LAYER, 0, 0b01, f"n{i}", 0.0).send
        crowd.sent(LAYER, 0, 0b01, f"n{i}", 0.0)
    assert crowd.admit(LAYER, 0, 0b11, "more", 0.1).send
    assert not crowd.admit(LAYER, 0, 0b11, "later", 0.1).send
    crowd.sent(LAYER, 0, 0b11, "more", 0.1)
    assert crowd.admit(LAYER, 0, 0b11, "later", 0.1).holders == ("more",)


def test_a_crowd_is_referred_to_those_who_were_sent_the_chunk() -> None:
    crowd = Crowd()
    for i in range(CHILDREN):
        assert crowd.admit(LAYER, 0, 1, f"n{i}", 0.0).send
    waiting = crowd.admit(LAYER, 0, 1, "late", 0.0)
    assert not waiting.send
    assert waiting.holders == ()  # nobody has it yet
    assert crowd.admit(LAYER, 0, 2, "late", 0.0).send  # another chunk of the group
    crowd.sent(LAYER, 0, 1, "n2", 0.1)
    assert crowd.admit(LAYER, 0, 1, "later", 0.1).holders == ("n2",)
    assert crowd.admit(LAYER, 0, 3, "later", 0.1).holders == ()  # n2 has only one of the two
    assert crowd.admit(LAYER, 0, 1, "n1", 0.1).send  # who was let in stays let in
    crowd.failed(LAYER, 0, 1, "n0", 0.2)
    assert crowd.admit(LAYER, 0, 1, "later", 0.2).send  # in the place of the one that did not get it


def test_a_crowd_is_over_some_seconds_after_the_last() -> None:
    crowd = Crowd(memory_s=10)
    for i in range(CHILDREN):
        crowd.admit(LAYER, 0, 1, f"n{i}", 0.0)
    assert not crowd.admit(LAYER, 0, 1, "x", 9.0).send
    assert crowd.admit(LAYER, 0, 1, "x", 19.5).send


EVENTS = st.tuples(st.integers(0, 5), st.integers(1, 15), st.integers(0, 30), st.sampled_from(["sent", "failed", "none"]))


@given(st.lists(EVENTS, max_size=200))
def test_no_chunk_is_sent_to_more_than_the_children(events: list[tuple[int, int, int, str]]) -> None:
    crowd = Crowd(max_groups=4)
    sent: dict[tuple[int, int], set[int]] = {}
    for group, bits, asker, then in events:
        if crowd.admit(LAYER, group, bits, f"n{asker}", 0.0).send and then != "none":
            getattr(crowd, then)(LAYER, group, bits, f"n{asker}", 0.0)
            for bit in range(4):
                if bits >> bit & 1 and then == "sent":
                    sent.setdefault((group, bit), set()).add(asker)
        assert len(crowd) <= 4
    if len({group for group, *_ in events}) <= 4:
        assert all(len(askers) <= CHILDREN for askers in sent.values())


def test_bits_of_a_range() -> None:
    assert bits_of(range(16, 18), 1) == 0b11
    assert bits_of(range(14, 18), 0) == 0b11 << 14


# health


def test_a_peer_that_fails_is_left_alone_for_growing_pauses() -> None:
    health = PeerHealth()
    now_s = 100.0
    for _ in range(FAILURES - 1):
        health.failed(now_s)
    assert health.state(now_s) == "up"
    assert health.may_ask(now_s)
    pauses = []
    health.failed(now_s)
    for _ in range(12):
        assert health.state(now_s) == "down"
        begin_s = now_s
        while not health.may_ask(now_s):
            now_s += 0.01
        pauses.append(now_s - begin_s)
        assert not health.may_ask(now_s)  # one at a time
        health.answered(0.001)  # it begins an answer, and does not end it
        health.failed(now_s)
    assert pauses[0] <= 0.51
    assert pauses[-1] > LONGEST_PAUSE_S / 2 - 1
    assert max(pauses) <= LONGEST_PAUSE_S + 1
    while not health.may_ask(now_s):
        now_s += 0.1
    health.finished()
    assert health.state(now_s) == "up"
    assert health.may_ask(now_s)
    assert health.may_ask(now_s)


def test_an_answer_ends_a_row_of_failures() -> None:
    health = PeerHealth()
    for _ in range(5):
        for _ in range(FAILURES - 1):
            health.failed(0.0)
        health.finished()
    assert health.state(0.0) == "up"


def test_a_peer_that_loses_every_race_is_down() -> None:
    health = PeerHealth()
    for _ in range(LOST_RACES):
        assert health.state(0.0) == "up"
        health.lost(0.0)
    assert health.state(0.0) == "down"


def test_a_liar_is_left_out_for_an_hour_whatever_it_does() -> None:
    health = PeerHealth()
    health.lied(0.0)
    health.finished()
    assert health.state(LEFT_OUT_S - 1) == "left_out"
    assert not health.may_ask(LEFT_OUT_S - 1)
    assert health.may_ask(LEFT_OUT_S + 1)


def test_a_trial_of_which_nothing_is_heard_is_not_the_last() -> None:
    health = PeerHealth()
    for _ in range(FAILURES):
        health.failed(0.0)
    assert health.may_ask(1.0)
    assert not health.may_ask(2.0)
    assert health.may_ask(60.0)


def test_a_second_request_waits_for_what_is_usual() -> None:
    answers = Answers()
    assert answers.hedge_s == SHORTEST_HEDGE_S
    for _ in range(90):
        answers.add(0.001)
    assert answers.hedge_s == SHORTEST_HEDGE_S
    for _ in range(20):
        answers.add(0.5)
    assert answers.hedge_s == 0.5


# settings


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"listen": "0.0.0.0:1", "name": "a:1"}, "peers_token_file"),
        ({"listen": "192.0.2.1:1"}, "peers_token_file"),
        ({"listen": "node.example:1"}, "peers_token_file"),
        ({"listen": "0.0.0.0:1", "open": True}, "peers_name"),
        ({"listen": "[::]:1", "open": True}, "peers_name"),
        ({"listen": "127.0.0.1"}, "HOST:PORT"),
        ({"listen": "127.0.0.1:99999"}, "HOST:PORT"),
        ({"listen": "127.0.0.1:1", "members": ["x"]}, "HOST:PORT"),
        ({"listen": "127.0.0.1:1", "tls_cert": "/x"}, "peers_tls"),
    ],
)
def test_settings_that_would_serve_everybody_or_nobody_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(PeersRefused, match=reason):
        check(PeersConfig(**changes))  # type: ignore[arg-type]


def test_settings_that_are_right() -> None:
    for config in (
        PeersConfig(listen="127.0.0.1:1"),
        PeersConfig(listen="[::1]:1"),
        PeersConfig(listen="localhost:1"),
        PeersConfig(listen="0.0.0.0:1", open=True, name="node:1"),
        PeersConfig(listen="192.0.2.1:1", token_file="/t"),
    ):
        check(config)
    assert own_name(PeersConfig(listen="127.0.0.1:1")) == "127.0.0.1:1"
    assert own_name(PeersConfig(listen="0.0.0.0:1", name="node:1")) == "node:1"


@pytest.mark.parametrize("text", ["", "short", "two words of a token!", "sixteen letters\x07!!"])
def test_tokens_that_are_none_are_refused(text: str, tmp_path: object) -> None:
    path = tmp_path / "token"  # type: ignore[operator]
    path.write_text(text)
    with pytest.raises(PeersRefused, match="peers_token_file"):
        read_token(PeersConfig(listen="127.0.0.1:1", token_file=str(path)))


def test_which_sources_are_opened_for_peers() -> None:
    registry, directory = "https://r.example/a/b", "oci:/srv/layout"
    assert not may_open(registry, [], set(), has_token=False)
    assert may_open(registry, [], {"r.example"}, has_token=False)  # in use here anyhow
    assert may_open(registry, [], set(), has_token=True)
    assert not may_open(registry, ["other.example"], set(), has_token=True)
    assert may_open(registry, ["r.example"], set(), has_token=False)
    for source in (directory, "file:///etc/passwd", "ftp://r.example/a", ""):
        assert not may_open(source, ["r.example", ""], {"r.example"}, has_token=True)


# what people see


def test_peers_in_the_report_of_a_node() -> None:
    members = [{"address": f"n{i}:1", "state": state} for i, state in enumerate(("up", "up", "left_out"))]
    shown = _peers_line({"name": "n:1", "members": members, "received_bytes": 5_000_000, "served_bytes": 0, "hedges": 2, "lies": 1})
    assert shown == ["peers         2 of 3 up (0 down, 1 left out); 5.0 MB received, 0 B sent, 2 asked for a second time, 1 lies"]
    assert _peers_line({"members": []}) == []
