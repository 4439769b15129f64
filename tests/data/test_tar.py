from __future__ import annotations

import gzip
import io
import lzma
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_builders import good_tar, numbers_of, pair, picture, read_bytes, tar_bytes, text

from clip_la.data.losses import Cause
from clip_la.data.spec import MIB, Limits
from clip_la.data.tar import parse_header

GOOD = good_tar(range(6))
ALL = list(range(6))
SHARD_SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def offsets(data: bytes) -> dict[str, tuple[int, int]]:
    """Where each member's header begins and its padded data ends."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {
            member.name: (member.offset, member.offset_data + -(-member.size // 512) * 512)
            for member in archive
        }


def extents() -> list[tuple[int, int]]:
    """Where each sample of GOOD begins and ends."""
    places = offsets(GOOD)
    return [(places[f"{i:09d}.jpg"][0], places[f"{i:09d}.json"][1]) for i in ALL]


def with_size(data: bytes, name: str, size: int) -> bytes:
    """The archive with a member's header claiming `size`, checksum and all."""
    start = offsets(data)[name][0]
    header = bytearray(data[start : start + 512])
    header[124:136] = b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return data[:start] + bytes(header) + data[start + 512 :]


def test_whole_archive(tmp_path: Path) -> None:
    samples, losses = read_bytes(tmp_path, GOOD)
    assert numbers_of(samples) == ALL
    assert not losses


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_non_ascii_names(tmp_path: Path, tar_format: int) -> None:
    folder = "d" * 90 if tar_format == tarfile.USTAR_FORMAT else "dä" * 200
    samples, losses = read_bytes(tmp_path, tar_bytes(pair(3, f"{folder}/key"), tar_format))
    assert [sample.key for sample in samples] == [f"{folder}/key"]
    assert numbers_of(samples) == [3]
    assert not losses


def test_joined_archives_are_read_whole(tmp_path: Path) -> None:
    samples, losses = read_bytes(tmp_path, good_tar([0, 1]) + good_tar([2, 3]))
    assert numbers_of(samples) == [0, 1, 2, 3]
    assert not losses


def test_joined_archives_share_no_sample(tmp_path: Path) -> None:
    image, caption, _ = pair(0, "k")
    samples, losses = read_bytes(tmp_path, tar_bytes([image]) + tar_bytes([caption]) + good_tar([1]))
    assert numbers_of(samples) == [1]
    assert losses.to_counts() == {"no_image": 1, "no_text": 1}


@pytest.mark.parametrize(
    ("cut", "expected", "causes"),
    [
        (offsets(GOOD)["000000003.txt"][0], [0, 1, 2], {"no_text": 1, "shard_truncated": 1}),
        (offsets(GOOD)["000000003.txt"][0] + 100, [0, 1, 2], {"no_text": 1, "shard_truncated": 1}),
        (offsets(GOOD)["000000003.txt"][0] + 517, [0, 1, 2], {"member_truncated": 1, "shard_truncated": 1}),
        (extents()[3][1], [0, 1, 2, 3], {"shard_truncated": 1}),
    ],
)
def test_truncated(tmp_path: Path, cut: int, expected: list[int], causes: dict[str, int]) -> None:
    samples, losses = read_bytes(tmp_path, GOOD[:cut])
    assert numbers_of(samples) == expected
    assert losses.to_counts() == causes


def test_bad_header_costs_one_sample(tmp_path: Path) -> None:
    data = bytearray(GOOD)
    data[offsets(GOOD)["000000002.jpg"][0]] ^= 0xFF
    samples, losses = read_bytes(tmp_path, bytes(data))
    assert numbers_of(samples) == [0, 1, 3, 4, 5]
    assert losses.to_counts() == {"bad_header": 1, "no_image": 1}


def test_zeroed_header_is_counted(tmp_path: Path) -> None:
    start = offsets(GOOD)["000000002.txt"][0]
    samples, losses = read_bytes(tmp_path, GOOD[:start] + bytes(512) + GOOD[start + 512 :])
    assert numbers_of(samples) == [0, 1, 3, 4, 5]
    assert losses.counts[Cause.BAD_HEADER] == 1


@pytest.mark.parametrize("size", [2000, 2**33, 2**60])
@pytest.mark.parametrize("suffix", ["jpg", "txt", "json", "npy"])
def test_lying_size_loses_no_sample_behind_it(tmp_path: Path, size: int, suffix: str) -> None:
    entries = [entry for number in ALL for entry in pair(number)]
    entries.insert(6, ("lie." + suffix, b"x" * 700))
    samples, losses = read_bytes(tmp_path, with_size(tar_bytes(entries), "lie." + suffix, size))
    assert numbers_of(samples) == ALL
    assert len(losses) == 1
    assert set(losses.counts) <= {Cause.BAD_SIZE, Cause.MEMBER_TOO_LARGE}


def test_nested_archive_is_not_looked_into(tmp_path: Path) -> None:
    entries = [*pair(0), ("inner.tar", good_tar([7, 8])), *pair(1)]
    samples, losses = read_bytes(tmp_path, tar_bytes(entries))
    assert numbers_of(samples) == [0, 1]
    assert losses.to_counts() == {"no_image": 1}


def test_large_members_are_not_read(tmp_path: Path) -> None:
    entries = [*pair(0), ("big.jpg", bytes(5 * MIB)), ("big.txt", b"big"), *pair(1)]
    samples, losses = read_bytes(tmp_path, tar_bytes(entries), Limits(member_bytes=MIB))
    assert numbers_of(samples) == [0, 1]
    assert losses.to_counts() == {"member_too_large": 1}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_not_followed(tmp_path: Path, kind: bytes) -> None:
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(picture(9))
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = kind, str(secret)
        archive.addfile(link)
        caption = tarfile.TarInfo("link.txt")
        caption.size = 4
        archive.addfile(caption, io.BytesIO(b"text"))
    samples, losses = read_bytes(tmp_path, file.getvalue() + good_tar([1]))
    assert numbers_of(samples) == [1]
    assert losses.to_counts() == {"link" if kind in (b"1", b"2") else "special_file": 1}


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", Cause.SHARD_EMPTY),
        (bytes(10240), Cause.SHARD_EMPTY),
        (b"<html>not found</html>", Cause.SHARD_NOT_A_TAR),
        (b"<html>not found</html>" * 1000, Cause.SHARD_NOT_A_TAR),
        (lzma.compress(GOOD), Cause.SHARD_COMPRESSED),
    ],
)
def test_not_a_tar(tmp_path: Path, data: bytes, cause: Cause) -> None:
    samples, losses = read_bytes(tmp_path, data)
    assert not samples
    assert losses.to_counts() == {cause.value: 1}


def test_gzip_is_read(tmp_path: Path) -> None:
    samples, losses = read_bytes(tmp_path, gzip.compress(GOOD[:4096]) + gzip.compress(GOOD[4096:]))
    assert numbers_of(samples) == ALL
    assert not losses


def test_truncated_gzip_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    data = gzip.compress(GOOD, compresslevel=0)
    samples, losses = read_bytes(tmp_path, data[: extents()[3][1] + 200])
    assert numbers_of(samples) == [0, 1, 2, 3]
    assert losses.counts[Cause.SHARD_UNREADABLE] == 1


def test_gzip_bomb_is_given_up(tmp_path: Path) -> None:
    samples, losses = read_bytes(tmp_path, gzip.compress(bytes(64 * MIB)), Limits(scan_bytes=MIB))
    assert not samples
    assert losses.counts[Cause.BAD_HEADER] == 1


def test_endless_garbage_is_given_up(tmp_path: Path) -> None:
    samples, losses = read_bytes(tmp_path, GOOD + b"\xff" * 8 * MIB + GOOD, Limits(scan_bytes=MIB))
    assert numbers_of(samples) == ALL
    assert losses.to_counts() == {"bad_header": 1}


def test_extended_header_is_bounded(tmp_path: Path) -> None:
    header = tarfile.TarInfo("huge")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 4 * MIB
    data = header.tobuf(tarfile.GNU_FORMAT) + b"n" * 4 * MIB + GOOD
    samples, losses = read_bytes(tmp_path, data)
    assert numbers_of(samples) == ALL
    assert losses.to_counts() == {"member_too_large": 1}


def test_a_lying_extended_header_loses_no_sample_behind_it(tmp_path: Path) -> None:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 2**33
    samples, losses = read_bytes(tmp_path, header.tobuf(tarfile.GNU_FORMAT) + GOOD)
    assert numbers_of(samples) == ALL
    assert losses.to_counts() == {"bad_size": 1}


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("damage", [b"\xff" * 512, bytes(512)])
def test_a_long_name_is_not_given_to_the_member_behind_a_lost_one(
    tar_format: int, damage: bytes, tmp_path: Path
) -> None:
    """The caption of one key would become that of another."""
    image, caption, _ = pair(1, "d" * 150)
    archive = tar_bytes([image, caption], tar_format)
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        header = opened.getmember(caption[0]).offset_data - 512
    other = tar_bytes([("000000002.txt", text(2)), *pair(3)])
    samples, losses = read_bytes(tmp_path, archive[:header] + damage + other)
    assert numbers_of(samples) == [3]
    assert losses.to_counts() == {"bad_header": 1, "no_image": 1, "no_text": 1}


def test_negative_and_garbled_numbers_are_no_headers() -> None:
    block = bytearray(tarfile.TarInfo("x.txt").tobuf(tarfile.GNU_FORMAT))
    assert parse_header(bytes(block)) is not None
    for size in (b"-0000000001\0", b"00_00000001\0", b"0o000000001\0", b"\xb2" * 12):
        block[124:136] = size
        block[148:156] = b" " * 8
        block[148:156] = f"{sum(block):06o}\0 ".encode()
        header = parse_header(bytes(block))
        assert header is None or header.size > 2**80


@SHARD_SETTINGS
@given(cut=st.integers(0, len(GOOD)))
def test_any_truncation_keeps_what_is_whole(tmp_path: Path, cut: int) -> None:
    samples, losses = read_bytes(tmp_path, GOOD[:cut])
    places = offsets(GOOD)
    ends_of_data = [places[f"{n:09d}.txt"][0] + 512 + len(text(n)) for n in ALL]  # json isn't needed
    assert numbers_of(samples) == [number for number, end in enumerate(ends_of_data) if end <= cut]
    assert bool(losses) == (cut < extents()[-1][1] + 512)


@SHARD_SETTINGS
@given(start=st.integers(0, len(GOOD) - 1), damage=st.binary(min_size=1, max_size=3000))
def test_any_damage_keeps_the_untouched_samples(tmp_path: Path, start: int, damage: bytes) -> None:
    end = min(len(GOOD), start + len(damage))
    data = GOOD[:start] + damage[: end - start] + GOOD[end:]
    samples, losses = read_bytes(tmp_path, data)
    untouched = [n for n, (first, last) in enumerate(extents()) if last <= start or first >= end]
    found = {sample.key: sample for sample in samples}
    assert numbers_of(found[f"{number:09d}"] for number in untouched) == untouched
    assert len(samples) + len(losses) >= len(ALL)


@SHARD_SETTINGS
@given(data=st.binary(max_size=4000))
def test_any_bytes_end_in_counted_losses(tmp_path: Path, data: bytes) -> None:
    samples, losses = read_bytes(tmp_path, data)
    assert not samples
    assert len(losses) >= 1
