"""Every option: from arguments, from the environment, and what is said about a value that cannot be right."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

from lightkeeper.errors import UsageError
from lightkeeper.manager.settings import PREFIX, Settings, read_settings, read_token, strange_variables

GOOD: dict[str, Any] = {
    "lighthouse": "lh.example:1234", "job": "run-7_a.b", "group": "g5", "groups": 9, "minimum": 2,
    "spares": 1, "role": "spare",
    "start_window_s": 3.5, "ranks": 4, "token": "secret", "run_folder": "/tmp/run",
    "outage_budget_s": 12.5, "host": "10.0.0.7", "bucket_mb": 0.5, "history_mb": 7.5,
    "fingerprint_every": 10, "nnodes": 2, "node_rank": 1, "manager": "n0.example:29500",
    "deal": "even", "slow": "evict", "notice_file": "/tmp/notice",
    "evidence_s": 1.0, "stall_floor_s": 5.0, "form_timeout_s": 6.0, "quorum_wait_s": 4.0,
    "stop_deadline_s": 150.0, "start_budget_s": 200.0, "first_step_s": 130.0,
    "reduce_timeout_s": 700.0, "collective_timeout_s": 1100.0,
}  # fmt: skip


def test_the_table_above_names_every_option() -> None:
    assert set(GOOD) >= {field.name for field in dataclasses.fields(Settings)}


@pytest.mark.parametrize("name", GOOD)
def test_an_option_comes_from_arguments_or_the_environment(name: str) -> None:
    base = {"groups": 9, "nnodes": 2, "ranks": 4}
    environment = {
        PREFIX + "GROUPS": "9",
        PREFIX + "NNODES": "2",
        PREFIX + "RANKS": "4",
        PREFIX + name.upper(): str(GOOD[name]),
    }
    default = getattr(Settings(groups=9), name) if name != "ranks" else 2
    assert getattr(read_settings({}, **{**base, name: GOOD[name]}), name) == GOOD[name]
    read = getattr(read_settings(environment), name)
    assert read == GOOD[name] and type(read) is type(GOOD[name])
    assert getattr(read_settings(environment, **{**base, name: default}), name) == default or (
        name in ("groups", "token") or default is None
    )


def test_all_options_there_and_back_through_the_environment() -> None:
    settings = Settings(**GOOD)
    assert read_settings(settings.to_environment()) == settings


def test_a_misspelt_variable_is_told_and_no_other() -> None:
    known = dict.fromkeys(Settings(**GOOD).to_environment(), "")
    kubernetes = [
        "LIGHTHOUSE_SERVICE_HOST",
        "LIGHTHOUSE_PORT",
        "LIGHTHOUSE_PORT_29400_TCP_ADDR",
        "LIGHTHOUSE_SERVICE_PORT_A",
    ]
    known |= {PREFIX + name: "" for name in kubernetes} | {"PATH": "", "LIGHT": ""}
    assert strange_variables(known) == ""
    told = strange_variables({**known, PREFIX + "MINIMUN": "2", PREFIX + "XYZZY": "1"})
    assert told == "LIGHTKEEPER_MINIMUN is not an option (LIGHTKEEPER_MINIMUM is), LIGHTKEEPER_XYZZY is not an option"


def test_no_variable_that_the_project_reads_is_taken_for_a_misspelt_one() -> None:
    root = Path(__file__).parents[2]
    folders = ("lightkeeper", "manager", "lighthouse", "supervisor", "checkpoint", "bench", "docs")
    paths = [path for name in folders for path in (root / name).rglob("*") if path.suffix in (".py", ".md")]
    text = "".join(path.read_text() for path in [*paths, *(root / "scripts").glob("[a-z]*")] if path.is_file())
    read = set(re.findall(r"LIGHTKEEPER_[A-Z_]+[A-Z]", text)) - {"LIGHTKEEPER_MINIMUN"}
    assert len(read) > 10 and strange_variables(dict.fromkeys(read, "")) == ""


def test_none_is_not_given() -> None:
    assert read_settings({PREFIX + "GROUP": "g3"}, group=None).group == "g3"


BAD: list[tuple[str, Any, str]] = [
    ("minimum", 0, "1 <= minimum <= groups must hold"),
    ("minimum", 2, "minimum 2 of 1 groups"),
    ("groups", 0, "1 <= minimum <= groups must hold"),
    ("spares", 1, "spares 1 of 1 groups: 0 <= spares < groups must hold"),
    ("spares", -1, "0 <= spares < groups must hold"),
    ("role", "bench", "role 'bench': give member, spare or reserve"),
    ("ranks", 0, "ranks 0: a group has at least one rank"),
    ("nnodes", 0, "nnodes 0: give 1 to 10000 nodes"),
    ("nnodes", 3, "each has as many of the group's 1 rank"),
    ("node_rank", 1, "node_rank 1: of 1 nodes give 0 to 0"),
    ("node_rank", -1, "node_rank -1"),
    ("manager", "n0", "manager: 'n0' is not an address of the form HOST:PORT"),
    ("manager", "n0:0", "name the port at which node 0 is to listen"),
    ("outage_budget_s", 0.5, "outage_budget_s 0.5: give 1 to 86400 seconds"),
    ("outage_budget_s", 1e9, "give 1 to 86400 seconds"),
    ("outage_budget_s", math.nan, "give 1 to 86400 seconds"),
    ("bucket_mb", 0.0, "bucket_mb 0.0: give 0.001 to 1024 MiB"),
    ("bucket_mb", 4096.0, "give 0.001 to 1024 MiB"),
    ("start_window_s", -1.0, "start_window_s"),
    ("fingerprint_every", -1, "fingerprint_every"),
    ("job", "", "job '': give 1 to 100"),
    ("job", "a b", "job 'a b': give"),
    ("group", "g/0", "group 'g/0': give"),
    ("group", "g" * 101, "give 1 to 100"),
    ("lighthouse", "nowhere", "lighthouse: 'nowhere' is not an address of the form HOST:PORT"),
    ("lighthouse", "host:99999", "HOST:PORT"),
    ("lighthouse", "host:", "HOST:PORT"),
]


@pytest.mark.parametrize(("name", "value", "line"), BAD, ids=[f"{name}={value}"[:40] for name, value, _ in BAD])
def test_a_bad_value_gives_one_line(name: str, value: Any, line: str) -> None:
    for read in (
        lambda: read_settings({}, **{name: value}),
        lambda: read_settings({PREFIX + name.upper(): str(value)}),
    ):
        with pytest.raises(UsageError) as raised:
            read()
        assert line in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("where", ["arguments", "environment"])
def test_members_and_spares_are_the_groups(where: str) -> None:
    given = {"members": 4, "spares": 1}
    environment = {PREFIX + name.upper(): str(value) for name, value in given.items()}
    read = read_settings({}, **given) if where == "arguments" else read_settings(environment)
    assert (read.groups, read.spares) == (5, 1)
    assert read_settings({**environment, **read.to_environment()}) == read, "as a child of a launcher reads it"
    assert read_settings(environment, members=2).groups == 3
    with pytest.raises(UsageError, match="members 4 and spares 1, and groups 4: groups are members and spares"):
        read_settings(environment, groups=4)


@pytest.mark.parametrize(
    "name",
    [
        "groups",
        "members",
        "spares",
        "minimum",
        "ranks",
        "outage_budget_s",
        "reduce_timeout_s",
        "bucket_mb",
        "start_window_s",
        "fingerprint_every",
    ],
)
@pytest.mark.parametrize("value", ["", "many", "1,5"])
def test_what_is_not_a_number_is_named_with_its_variable(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"LIGHTKEEPER_{name.upper()}='{value}' is not a number"):
        read_settings({PREFIX + name.upper(): value})


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_start_window_is_a_finite_number(value: str) -> None:
    with pytest.raises(UsageError):
        read_settings({PREFIX + "START_WINDOW_S": value})


@pytest.mark.parametrize("name", ["job", "group"])
def test_a_name_that_no_call_can_carry_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        Settings(**{name: "größe"})


def test_more_groups_than_a_message_can_say_are_refused() -> None:
    with pytest.raises(UsageError):
        Settings(groups=1 << 32)


# ---------------------------------------------------------------- the token


def test_the_token_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("  secret\n")
    assert read_settings({PREFIX + "TOKEN_FILE": str(path)}).token == "secret"
    assert read_settings({PREFIX + "TOKEN_FILE": str(path), PREFIX + "TOKEN": "other"}).token == "other"
    assert read_settings({}).token == "" and read_token("") == ""


def test_a_token_file_that_is_missing_empty_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the token file .*missing"):
        read_token(tmp_path / "missing")
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(UsageError, match=r"the token file .*empty is empty"):
        read_token(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"cannot read the token file .*binary"):
        read_token(tmp_path / "binary")


@pytest.mark.parametrize("content", ["two\nlines", "schlüssel"])
def test_a_token_that_no_call_can_carry_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError):
        read_token(tmp_path / "token")


def test_what_is_derived_from_the_outage_budget() -> None:
    settings = Settings(outage_budget_s=20)
    assert settings.timeouts.form_timeout_s < settings.outage_budget_s < settings.timeouts.start_budget_s
    assert settings.timeouts.reduce_timeout_s == 240 and settings.reduce_timeout_s is None
