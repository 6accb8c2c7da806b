"""Signatures: what is signed, whose count, and that a store that requires them uses nothing else."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from chunks import make_chunk

from pictool import strict_yaml
from pictool.commands.settings.file import write_setting
from pictool.errors import InputError, ObjectError, StoreError
from pictool.store.objects.bundles import export_archive, import_archive
from pictool.store.objects.format import CompiledChunk, ObjectFile
from pictool.store.remote.remote import Remote
from pictool.store.remote.transfer import pull, push
from pictool.store.signatures import (
    MAX_LINES,
    Signed,
    Signers,
    SigningKey,
    Trust,
    lines_of,
    merge,
    read_sidecar,
    sidecar_of,
    sign_file,
    sign_object_file,
)
from pictool.store.store import Store
from pictool.store.upkeep import expire, verify


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return SigningKey.new(tmp_path / "key")


@pytest.fixture
def signers(tmp_path: Path, key: SigningKey) -> Signers:
    return Signers(tmp_path / "signers", {key.public: "me"}, {})


@pytest.fixture
def careful(tmp_path: Path, signers: Signers) -> Store:
    """The store `store`, of which only signed objects are used."""
    return Store(tmp_path / "store", trust=Trust(signers))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def planted(chunk: CompiledChunk) -> CompiledChunk:
    """Other KV of the same tokens: the key is right, and so is every checksum."""
    return replace(chunk, layers=[tuple(bytes(len(part)) for part in layer) for layer in chunk.layers])


def test_an_object_counts_if_a_trusted_key_signed_it(store: Store, careful: Store, key: SigningKey) -> None:
    path = store.put(make_chunk(1))
    assert not careful.has(path.stem)
    with pytest.raises(StoreError, match=f"^{path.stem[:12]}: "):
        careful.open(path.stem)
    sign_object_file(key, path)
    careful.open(path.stem).close()
    assert careful.has_whole(path.stem) and verify(careful).unsigned == ()


def test_an_unsigned_object_is_absent_as_one_of_another_salt(store: Store, careful: Store) -> None:
    path = store.put(make_chunk(1))
    with pytest.raises(StoreError) as unsigned, careful.peek(path.stem):
        pass
    assert str(unsigned.value) == str(careful.absent(path.stem))
    with pytest.raises(StoreError, match=f"^{path.stem[:8]}: "):
        careful.resolve(path.stem[:8], "")
    assert [stored.key for stored in careful.objects()] == [path.stem]  # its owner sees it
    assert verify(careful).unsigned == (path.stem,)


def test_what_is_forged_swapped_replayed_or_truncated_does_not_count(
    store: Store, careful: Store, key: SigningKey
) -> None:
    one, other = store.put(make_chunk(1)), store.put(make_chunk(2))
    for path in (one, other):
        sign_object_file(key, path)
    honest, sidecar = one.read_bytes(), sidecar_of(one).read_bytes()
    store.put(planted(make_chunk(1)))  # forged, beside the signature of the honest one
    assert one.read_bytes() != honest and not careful.has(one.stem)
    one.write_bytes(honest)
    sidecar_of(one).write_bytes(sidecar_of(other).read_bytes())  # swapped
    assert not careful.has(one.stem)
    for length in range(0, len(sidecar) - 1, 7):  # truncated
        sidecar_of(one).write_bytes(sidecar[:length])
        assert not careful.has(one.stem)
    sidecar_of(one).write_bytes(sidecar)
    assert careful.has(one.stem)
    one.write_bytes(other.read_bytes())  # replayed: another object, signed, under this one's name
    sidecar_of(one).write_bytes(sidecar_of(other).read_bytes())
    assert not careful.has(one.stem)
    one.write_bytes(honest[:-1])
    sidecar_of(one).write_bytes(sidecar)
    assert not careful.has(one.stem)


def test_a_signature_is_bound_to_the_key_and_the_kind(store: Store, signers: Signers, key: SigningKey) -> None:
    with store.peek(store.put(make_chunk(1)).stem) as file:
        signed = Signed.of_object(file)
    sidecar = key.sign(signed)
    assert signers.signer_of(signed, sidecar) == "me"
    assert signers.signer_of(Signed(signed.digest, "0" * 64), sidecar) is None
    assert signers.signer_of(Signed(signed.digest), sidecar) is None  # as a whole file's


def test_a_revoked_key_counts_no_more_and_is_listed(
    tmp_path: Path, store: Store, signers: Signers, key: SigningKey
) -> None:
    path = store.put(make_chunk(1))
    sign_object_file(key, path)
    signers.write()
    new = SigningKey.new(tmp_path / "new")
    Signers.read(signers.path).trust("new", new.public).revoke("me").write()
    after = Signers.read(signers.path)
    assert (after.trusted, after.revoked) == ({new.public: "new"}, {key.public: "me"})
    careful = Store(store.root, trust=Trust(after))
    assert not careful.has(path.stem)
    with pytest.raises(InputError, match=f"^{key.public}: "):
        after.trust("again", key.public)
    sign_object_file(new, path)  # keys rotate: both signatures are there
    assert careful.has(path.stem) and Store(store.root, trust=Trust(signers)).has(path.stem)
    with after.path.open("a") as file:
        file.write(f"{key.public} me\n")  # a line that trusts it again
    assert key.public not in Signers.read(after.path).trusted


def test_what_this_process_computed_counts_without_a_signature(careful: Store) -> None:
    chunk = make_chunk(1)
    key = careful.put(chunk).stem
    assert careful.has(key)
    Store(careful.root).put(planted(chunk))  # another process replaces it
    assert not careful.has(key)
    careful.put(chunk)
    assert careful.has(key) and not Store(careful.root, trust=careful.trust).has(key)


def test_a_store_with_a_key_signs_what_is_put(tmp_path: Path, signers: Signers, key: SigningKey) -> None:
    written = Store(tmp_path / "store", trust=Trust(None, key)).put(make_chunk(1))
    assert Store(tmp_path / "store", trust=Trust(signers)).has(written.stem)
    expire(Store(tmp_path / "store"), [written.stem])
    assert not sidecar_of(written).exists()


def test_no_clock_decides(careful: Store, store: Store, key: SigningKey, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.put(make_chunk(1))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 1 << 62)
    sign_object_file(key, path)
    assert careful.has(path.stem)
    monkeypatch.undo()
    os.utime(sidecar_of(path), (0, 0))
    assert careful.has(path.stem)


def test_a_private_key_is_its_owner_s_alone(tmp_path: Path, key: SigningKey) -> None:
    assert key.path.stat().st_mode & 0o777 == 0o600 and "_private=" not in repr(key)
    assert SigningKey.read(key.path).public == key.public == pickle.loads(pickle.dumps(key)).public
    with pytest.raises(InputError, match=f"^{key.path}: "):
        SigningKey.new(key.path)
    key.path.unlink()
    assert SigningKey.new(key.path).public != key.public
    key.path.chmod(0o640)
    with pytest.raises(InputError, match=f"^{key.path}: "):
        SigningKey.read(key.path)
    with pytest.raises(InputError, match=f"^{tmp_path / 'none'}: "):
        SigningKey.read(tmp_path / "none")
    (tmp_path / "text").write_text("x")
    (tmp_path / "text").chmod(0o600)
    with pytest.raises(InputError, match=f"^{tmp_path / 'text'}: "):
        SigningKey.read(tmp_path / "text")


def test_a_list_of_signers_that_others_may_write_is_refused(signers: Signers) -> None:
    signers.write()
    assert Signers.read(signers.path) == signers == pickle.loads(pickle.dumps(signers))
    signers.path.chmod(0o664)
    with pytest.raises(InputError, match=f"^{signers.path}: "):
        Signers.read(signers.path)
    signers.path.chmod(0o600)
    signers.path.write_text("ed25519:12 me\n")
    with pytest.raises(InputError, match=f"^{signers.path}:1: "):
        Signers.read(signers.path)
    signers.path.unlink()
    with pytest.raises(InputError, match=f"^{signers.path}: "):
        Signers.read(signers.path)


def test_signers_have_names_of_their_own(signers: Signers, key: SigningKey, tmp_path: Path) -> None:
    other = SigningKey.new(tmp_path / "other")
    for name, public in (("me", other.public), ("", other.public), ("x\ny", other.public), ("x", "ed25519:12")):
        with pytest.raises(InputError):
            signers.trust(name, public)
    with pytest.raises(InputError, match=r"^nobody: "):
        signers.revoke("nobody")


def test_a_sidecar_keeps_those_of_the_object_as_it_is(key: SigningKey) -> None:
    many = b"".join(key.sign(Signed(f"{number:064x}", "a" * 64)) for number in range(40))
    kept = lines_of(merge(many, key.sign(Signed("f" * 64, "a" * 64)), digest="f" * 64))
    assert len(kept) == MAX_LINES and kept[0][1] == "f" * 64
    assert lines_of(b"\xff" * 100_000) == lines_of(b"x\n" * 50) == []


def test_signatures_travel_with_push_and_pull(
    tmp_path: Path, store: Store, signers: Signers, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / "far"
    signed, unsigned = (store.put(make_chunk(seed)).stem for seed in (1, 2))
    sign_object_file(key, store.path(signed))
    sender = Store(store.root, remote=str(far))
    push(sender, [signed, unsigned])
    here = Store(tmp_path / "here", remote=str(far), trust=Trust(signers))
    assert here.has(signed) and not here.has(unsigned)
    assert not here.path(unsigned).exists()  # nothing of it enters the store
    here.drain()
    assert Store(here.root, trust=Trust(signers)).has(signed)
    with pytest.raises(StoreError, match=str(far)):
        pull(here, [unsigned])
    plain = Store(tmp_path / "plain", remote=str(far))
    monkeypatch.setattr(Remote, "read_signatures", lambda *_: pytest.fail("one request more without the setting"))
    pull(plain, [signed, unsigned])
    pull(plain, [signed])
    monkeypatch.undo()
    sign_object_file(key, store.path(unsigned))  # signed later: what is present gets its signature
    push(sender, [unsigned])
    requiring = Store(plain.root, remote=str(far), trust=Trust(signers))
    assert not requiring.has(unsigned)
    pull(requiring, [signed, unsigned])
    assert read_sidecar(plain.path(signed)) == read_sidecar(store.path(signed)) != b""
    assert Store(plain.root, trust=Trust(signers)).has(unsigned)


def test_a_forged_object_of_a_remote_is_absent(tmp_path: Path, store: Store, signers: Signers, key: SigningKey) -> None:
    path = store.put(make_chunk(1))
    sign_object_file(key, path)
    push(Store(store.root, remote=str(tmp_path / "far")), [path.stem])
    Store(tmp_path / "far").put(planted(make_chunk(1)))
    here = Store(tmp_path / "here", remote=str(tmp_path / "far"), trust=Trust(signers))
    with pytest.raises(StoreError, match=f"^{path.stem[:12]}: "):
        here.open(path.stem)
    here.drain()
    assert not here.path(path.stem).exists()


def test_an_archive_is_signed_as_a_whole(tmp_path: Path, store: Store, signers: Signers, key: SigningKey) -> None:
    keys = [store.put(make_chunk(seed)).stem for seed in (1, 2)]
    sign_object_file(key, store.path(keys[0]))
    archive = tmp_path / "x.kva"
    export_archive(store, keys, archive)
    here = Store(tmp_path / "here", trust=Trust(signers))
    with pytest.raises(InputError, match=f"^{archive}: "):
        import_archive(here, archive)
    sign_file(key, archive)
    assert len(import_archive(here, archive).new) == 2
    assert here.has(keys[0]) and not here.has(keys[1])  # its signature came with it
    export_archive(Store(store.root, trust=Trust(None, key)), keys[:1], archive)
    import_archive(Store(tmp_path / "there", trust=Trust(signers)), archive)
    archive.write_bytes(archive.read_bytes() + b"\0")
    with pytest.raises(InputError, match=f"^{archive}: "):
        import_archive(here, archive)


def test_a_hostile_sidecar_is_as_none(careful: Store, store: Store, key: SigningKey) -> None:
    path = store.put(make_chunk(1))
    sidecar = sidecar_of(path)
    os.mkfifo(sidecar)
    assert not careful.has(path.stem)
    sidecar.unlink()
    sidecar.symlink_to("/dev/zero")
    assert not careful.has(path.stem)
    sidecar.unlink()
    sign_object_file(key, path)
    sidecar.write_bytes(b"x" * (9 << 10))
    assert not careful.has(path.stem)


def test_a_damaged_object_is_still_called_damaged(careful: Store, store: Store) -> None:
    path = store.put(make_chunk(1))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ObjectError):
        careful.peek(path.stem)


def test_without_the_setting_nothing_of_cryptography_is_imported(tmp_path: Path) -> None:
    program = "import sys; from pictool.store.store import Store; Store('s').has('a' * 64); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "pictool.store.store" in done.stdout and "cryptography" not in done.stdout


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    """Lists of signers, signatures in a store, at a remote directory and of a file, and settings."""
    keys = [SigningKey.new(tmp_path / f"key-{number}") for number in range(6)]
    path, archive, settings = tmp_path / "signers", tmp_path / "x.kva", tmp_path / "pic.yaml"
    archive.write_bytes(b"archive")
    store, remote = Store(tmp_path / "store"), Remote(str(tmp_path / "remote"))
    object_path = store.put(make_chunk(1))
    with ObjectFile(object_path) as file:
        signed = Signed.of_object(file)
        remote.write(signed.key, object_path)
    names = ["algo", "codec", "store", "model", "device", "remote"]
    together = multiprocessing.get_context("fork")
    gate = together.Barrier(len(keys))

    def change(number: int) -> None:
        key = keys[number]
        gate.wait()
        Signers.change(path, lambda them: them.trust(f"signer {number}", key.public), is_new=True)
        sign_file(key, archive)
        sign_object_file(key, object_path, store.root / "tmp")
        remote.write_signatures(signed, key.sign(signed))
        write_setting(settings, names[number], "naive")
        if number % 2:
            Signers.change(path, lambda them: them.revoke(f"signer {number}"))

    processes = [together.Process(target=change, args=(number,)) for number in range(len(keys))]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(keys)
    after = Signers.read(path)
    assert set(after.trusted) == {key.public for key in keys[::2]}
    assert set(after.revoked) == {key.public for key in keys[1::2]}
    for sidecar in (read_sidecar(archive), read_sidecar(object_path), remote.read_signatures(signed.key)):
        assert {public for public, _, _ in lines_of(sidecar)} == {key.public for key in keys}
    assert set(strict_yaml.load(settings.read_bytes())) == set(names)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith((".tmp", ".lock"))]
