"""A job that starts again continues the run that it has begun, and no other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deltasync import Publisher, Replica
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ChannelInUseError, ConfigError, FencedError
from deltasync.opening.owner import owner_of
from deltasync.stores import open_store
from tests import builders
from tests.conftest import assert_same_bits


def test_a_job_that_starts_again_continues_its_own_run(channel_url: str, tmp_path: Path) -> None:
    file, first = tmp_path / "output/owner", builders.weights()
    second = builders.trained(first, 1)
    with Publisher(channel_url, owner=file) as publisher:
        owner = file.read_text().strip()  # it is on the disk before the first version
        builders.publish(publisher, first)
    assert ChannelReader(open_store(channel_url)).channel().owner == owner
    with Publisher(channel_url, owner=file) as publisher:
        assert builders.publish(publisher, second).version == 2
    with Publisher(channel_url, owner=owner) as publisher:  # the text is the same owner
        assert builders.publish(publisher, second).version == 3
    replica = Replica(channel_url)
    replica.sync()
    assert_same_bits(replica.state_dict(), second)


@pytest.mark.parametrize("of_channel", [None, "slurm:1"])
def test_another_job_is_refused(channel_url: str, tmp_path: Path, of_channel: str | None) -> None:
    with Publisher(channel_url, owner=of_channel) as publisher:
        builders.publish(publisher, builders.weights())
    for owner in (None, "slurm:2", tmp_path / "owner"):
        with pytest.raises(ChannelInUseError, match="Pass resume=True"):
            Publisher(channel_url, owner=owner)
    with Publisher(channel_url, owner="slurm:2", resume=True) as publisher:
        assert publisher.version == 1


def test_of_two_jobs_with_one_owner_the_later_one_writes(channel_url: str) -> None:
    first = Publisher(channel_url, owner="job")
    builders.publish(first, builders.weights())
    with Publisher(channel_url, owner="job") as second:
        with pytest.raises(FencedError):
            builders.publish(first, builders.trained(builders.weights(), 1))
        assert builders.publish(second, builders.weights()).version == 2
    with pytest.raises(FencedError):
        first.close()


def test_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a/b/owner"
    made = owner_of(file)
    assert made is not None
    assert (owner_of(file), [path.name for path in file.parent.iterdir()]) == (made, ["owner"])
    assert owner_of(tmp_path / "other") != made
    file.write_text("")  # a write that was cut off, before anything was published
    assert owner_of(file) not in (made, "")


@pytest.mark.parametrize("wrong", ["", "a b", "a/b", "x" * 101, "\n", "é", 7])
def test_no_owner(wrong: object) -> None:
    with pytest.raises(ConfigError, match="owner must be"):
        owner_of(wrong)  # type: ignore[arg-type]


def test_a_file_of_another_program_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "owner"
    file.write_text("two words\n")
    with pytest.raises(ConfigError, match="holds no owner's id"):
        owner_of(file)
    assert file.read_text() == "two words\n"


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        Publisher(f"file://{tmp_path}/channel", owner=tmp_path / "file/owner")
    assert os.listdir(tmp_path) == ["file"]
