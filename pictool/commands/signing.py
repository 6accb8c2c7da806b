"""`pic store sign` and `trust`: who made an object, and whose objects are used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

from pictool.commands.console.errors import UsageError
from pictool.commands.console.outputs import print_json
from pictool.commands.console.verbosity import note
from pictool.commands.settings.options import JsonOption, argument, option
from pictool.commands.settings.resources import find_intact, open_existing, open_store
from pictool.commands.settings.settings import Settings
from pictool.escapes import visible

ALL = "all"  # in place of keys


def run_sign(
    settings: Settings,
    names: Annotated[
        Optional[list[str]],
        argument("NAME", "Keys, or unique beginnings of them; all; or files, as archives and manifests."),
    ] = None,
) -> None:
    """Sign objects that you made or checked, and whole files. Without a NAME: print the public key that others trust;
    if there is no private key, make one.

    \b
      pic store sign
      pic store sign all
      pic store sign all.kva
    """
    from pictool.store.signatures import SigningKey, path_of, sign_file, sign_object_file

    file = path_of(settings.signing_key, "signing-key")
    if not names:
        print(public_key(file))
        return
    key, store = SigningKey.read(file), open_store(settings)
    for name in names:
        if name != ALL and Path(name).is_file():
            (sign_object_file if name.endswith(".kvo") else sign_file)(key, Path(name))
            continue
        for found in find_intact(open_existing(settings), chains=False) if name == ALL else [store.resolve(name)]:
            sign_object_file(key, store.path(found), store.root / "tmp")
    note(f"signed by {key.public}")


def public_key(file: Path) -> str:
    """The public key of the private one in a file, which is made if there is none."""
    from pictool.store.signatures import SigningKey

    if file.exists():
        return SigningKey.read(file).public
    note(f"{file}: a new private key, for you alone; others trust the public one (pic store trust NAME KEY)")
    return SigningKey.new(file).public


def run_trust(
    settings: Settings,
    name: Annotated[Optional[str], argument("NAME", "What you call the signer.")] = None,
    key: Annotated[Optional[str], argument("KEY", "Its public key, as ed25519:…", autocompletion=None)] = None,
    revoke: Annotated[Optional[str], option("--revoke", "NAME", "Trust a signer no more, nor what it signed.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Trust a signer, revoke one, or list all.

    \b
      pic store trust build-server ed25519:6d1f…
      pic store trust --revoke build-server
    """
    from pictool.store.signatures import Signers, path_of

    if (name is None) != (key is None) or (name and revoke):
        raise UsageError("trust: give a NAME and a KEY, or --revoke NAME, or neither to list the signers")
    path = path_of(settings.require_signed, "signers")
    if not name and not revoke:
        signers = Signers.read(path)
    else:
        signers = Signers.change(
            path, lambda them: them.trust(name, key) if name and key else them.revoke(revoke or ""), name is not None
        )
    if as_json:
        print_json({"path": str(signers.path), "trusted": signers.trusted, "revoked": signers.revoked})
        return
    for known, state in ((signers.trusted, ""), (signers.revoked, "  revoked")):
        for public, own in known.items():
            print(visible(f"{public}  {own}{state}"))
