"""Stored checksums of torch.save identify files that were damaged after saving."""

from __future__ import annotations

import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import pytest
from test_evidence import compare_folder, read_evidence, save, weights

import syncheck
from syncheck.comparison import evidence

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


def damage(path: Path, key: int, at: int, bits: int = 1) -> None:
    """Flip bits of one byte of a record, but keep the stored checksum. key: the number of the storage."""
    with zipfile.ZipFile(path) as archive:
        (info,) = [info for info in archive.infolist() if info.filename.endswith(f"/data/{key}")]
    raw = bytearray(path.read_bytes())
    names = raw[info.header_offset + 26] + 256 * raw[info.header_offset + 27]
    extra = raw[info.header_offset + 28] + 256 * raw[info.header_offset + 29]
    raw[info.header_offset + 30 + names + extra + at] ^= bits
    path.write_bytes(raw)


class TestDamaged:
    """Ranks whose files changed after torch.save wrote the files."""

    @pytest.mark.parametrize(
        "made",
        [
            lambda: weights(),
            lambda: weights().reshape(4, 6).t(),
            lambda: weights(48).reshape(2, 4, 3, 2).to(memory_format=torch.channels_last),
            lambda: weights().to(torch.bfloat16),
            lambda: weights().to(torch.complex64).conj(),
            lambda: weights()[6:18],
            lambda: weights().reshape(4, 6)[:, 1:3],
            lambda: weights(4).expand(3, 4),
            lambda: weights(1).reshape(()),
        ],
        ids=["plain", "transposed", "channels last", "bfloat16", "conjugated", "view", "columns", "expanded", "0-dim"],
    )
    def test_damaged_file_is_identified(self, tmp_path: Path, made: Callable[[], Any]) -> None:
        """One damaged byte identifies the damaged file of two, whatever part of its storage the tensor covers."""
        state = {"w": made()}
        paths = save(tmp_path, state, state)
        index = state["w"].storage_offset() + (1 if state["w"].numel() > 1 else 0)
        damage(paths[1], 0, index * state["w"].element_size())
        assert read_evidence(tmp_path).damaged == (1,)
        assert syncheck.compare(tmp_path).groups[0].findings[0].code == "SYN223"

    def test_different_values_are_not_damage(self, tmp_path: Path) -> None:
        """Files saved with different values have correct checksums and are not damaged."""
        save(tmp_path, {"w": weights(), "v": weights()[3:]}, {"w": weights() + 1, "v": weights()[3:] - 1})
        for name in ("w", "v"):
            assert read_evidence(tmp_path, name).norms
            assert read_evidence(tmp_path, name).damaged == ()

    def test_damaged_majority(self, tmp_path: Path) -> None:
        """Each damaged file is reported, even if two damaged files outvote the intact file."""
        paths = save(tmp_path, *[{"w": weights(), "other": weights()} for _ in range(3)])
        for path in paths[1:]:
            damage(path, 0, 9)
        assert read_evidence(tmp_path).damaged == (1, 2)
        assert compare_folder(tmp_path)["w"].minority == (0,)
        assert syncheck.compare(tmp_path).groups[0].findings[0].ranks == (1, 2)

    def test_views_of_one_record(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The checksum of a shared storage is computed once per file, and only differing views are damaged."""
        flat = weights(1000)
        state = {f"p{i}": flat[i * 100 : (i + 1) * 100] for i in range(10)}
        paths = save(tmp_path, state, state)
        for i in range(6):
            damage(paths[0], 0, 400 * i + 4)
        read: list[int] = []
        real = zlib.crc32

        def counted(data: Any, start: int = 0) -> int:
            read.append(len(data))
            return real(data, start)

        monkeypatch.setattr(evidence.zlib, "crc32", counted)
        diffs = compare_folder(tmp_path)
        assert {name: diff.evidence.damaged for name, diff in diffs.items() if diff.evidence} == {
            f"p{i}": (0,) for i in range(6)
        }
        assert [length for length in read if length >= 4000] == [4000, 4000]  # besides the checksums of the pickles

    def test_no_damage_without_stored_checksums(self, tmp_path: Path) -> None:
        """Without stored checksums, in torch.save files or other formats, no file is reported as damaged."""
        if not hasattr(torch.serialization, "set_crc32_options"):
            pytest.skip("this torch always stores them")
        torch.serialization.set_crc32_options(False)
        try:
            paths = save(tmp_path, {"w": weights()}, {"w": weights()})
        finally:
            torch.serialization.set_crc32_options(True)
        damage(paths[1], 0, 4)
        assert (read_evidence(tmp_path).flipped_bits, read_evidence(tmp_path).damaged) == (1, ())
        for rank, path in enumerate(paths):
            path.unlink()
            safetensors.save_file({"w": weights() + torch.eye(24)[3] * rank}, tmp_path / f"m_rank{rank}.safetensors")
        assert (read_evidence(tmp_path).values, read_evidence(tmp_path).damaged) == ({0: 4.0, 1: 5.0}, ())

    def test_checked_bytes_are_limited(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Bytes of almost fully different tensors are checked up to a limit, and partly different tensors always."""
        state = {name: weights() for name in ("a", "b", "c")}
        paths = save(tmp_path, state, {name: tensor + 1 for name, tensor in state.items()})
        for key in range(3):
            damage(paths[1], key, 1)
        monkeypatch.setattr(evidence, "CHECKED", 2 * 96)  # one tensor of 24 float32 on two ranks
        assert {name: diff.evidence.damaged for name, diff in compare_folder(tmp_path).items() if diff.evidence} == {
            "a": (1,), "b": (), "c": (),
        }  # fmt: skip
        monkeypatch.setattr(evidence, "CHECKED", 0)
        torch.save(state, paths[1])
        damage(paths[1], 2, 1)
        assert read_evidence(tmp_path, "c").damaged == (1,)
