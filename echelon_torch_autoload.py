"""Tell torch that there is a backend named `echelon`.

Torch loads this module, the entry point `torch.backends`, in every `import torch` of the
environment, and an exception here would break that import. So it stands outside our package,
imports nothing, and swallows everything: a broken installation of ours shows when somebody asks for
the backend, and nobody else notices. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns it off.
"""

import sys


def register() -> None:
    """Register the backend. Never raises."""
    try:
        known = sys.modules["torch.distributed"].Backend
        known.register_backend("echelon", _create, extended_api=True, devices=["cpu", "cuda"])
        known.backend_capability["echelon"] = ["cpu", "cuda", "xpu"]
    except Exception:  # noqa: BLE001, S110 -- a torch without distributed is no error of its user's
        pass


def _create(options, group_options):  # noqa: ANN001, ANN202 -- no typing import either
    from echelon.dist.torch_backend.create import create

    return create(options, group_options)
