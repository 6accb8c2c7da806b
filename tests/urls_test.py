"""What is shown of URLs."""

from __future__ import annotations

import pytest

from pictool.urls import without_credentials


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://user:secret@host/bucket", "s3://host/bucket"),
        ("https://host/path?X-Amz-Signature=1", "https://host/path?…"),
        ("from 'https://a:b@host/x' and git+ssh://c@other", "from 'https://host/x' and git+ssh://other"),
        ("//a:b@host", "//host"),
        ("no URL, a:b@c", "no URL, a:b@c"),
    ],
)
def test_credentials_are_not_shown(text: str, shown: str) -> None:
    assert without_credentials(text) == shown
