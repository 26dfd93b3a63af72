"""Which files are the user's own."""

from __future__ import annotations

import pytest

from echelon.recorder.write.sites import is_user_file


@pytest.mark.parametrize(
    ("path", "is_users"),
    [
        ("/home/me/train.py", True),
        ("/home/me/my-site-packages/train.py", True),
        ("/opt/base/lib/python3.11/site-packages/torch/_dynamo/callback.py", False),
        ("/home/me/.local/lib/python3.12/site-packages/lightning/trainer.py", False),
        ("/usr/lib/python3/dist-packages/torch/serialization.py", False),
    ],
)
def test_an_installed_package_of_another_environment_is_not_the_users(path, is_users):
    # A virtual environment with system packages, user sites and PYTHONPATH lie beside sysconfig's.
    assert is_user_file(path) is is_users
