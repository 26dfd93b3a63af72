"""Register a backend named `echelon` with torch.

Torch loads this module, the entry point `torch.backends`, in every `import torch` of the
environment, and an exception here would break that import. So it stands outside our package,
imports nothing that torch has not imported, and swallows everything: a broken installation of ours
shows when a program asks for the backend, and no other program notices.
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns it off.

`ECHELON_TORCH_BACKEND=echelon` (set by `echelon run --torch-backend echelon`) makes our backend
stand in where a program asks for gloo, or for no backend by name, so that an unmodified program is
recorded. What asks for nccl, or any other, gets that.

Under `echelon run`, and anywhere with `ECHELON_RECORD=1`, a program that makes a process group is
recorded whatever its backend (`echelon/recorder/torch/`); `ECHELON_RECORD=0` turns that off.
"""

import os
import sys

_VARIABLE = "ECHELON_TORCH_BACKEND"
_OURS = "echelon"


def register() -> None:
    """Register the backend with torch. Never raises."""
    try:
        known = sys.modules["torch.distributed"].Backend
        known.register_backend(_OURS, _create, extended_api=True, devices=["cpu", "cuda"])
        known.backend_capability[_OURS] = ["cpu", "cuda", "xpu"]
    except Exception:  # noqa: BLE001 -- a torch built without distributed is not an error
        return
    wanted = os.environ.get(_VARIABLE, "")
    try:
        if wanted not in ("", _OURS):
            raise ValueError(f"{wanted!r} is not {_OURS!r}")
        if wanted:
            _stand_in()
    except Exception as err:  # noqa: BLE001 -- the program runs as it would without us
        sys.stderr.write(
            f"echelon: {_VARIABLE} has no effect, torch's own backends are used: {err}\n"
        )
    if _is_recorded(os.environ):
        _record()


def _is_recorded(environ) -> bool:  # noqa: ANN001
    """Return whether ranks in this environment keep a record."""
    wanted = environ.get("ECHELON_RECORD", "")
    if wanted == "0" or environ.get("ECHELON_RECORDER_SIZE") == "0":
        return False
    return wanted == "1" or "ECHELON_RANK_DIR" in environ or "ECHELON_RECORD_DIR" in environ


def _record() -> None:
    """Start recording when the program creates its first process group, loading nothing before."""
    try:
        c10d = sys.modules["torch.distributed.distributed_c10d"]
        make = c10d._new_process_group_helper
    except Exception:  # noqa: BLE001 -- a torch without distributed
        return
    made = []

    def make_group(*args, **named):  # noqa: ANN002, ANN003, ANN202
        if not made:
            try:
                from echelon.recorder.torch.start import recording

                made.append(recording(make))
            except Exception:  # noqa: BLE001 -- the program trains without its record
                made.append(make)
        return made[0](*args, **named)

    c10d._new_process_group_helper = make_group


def _create(options, group_options):  # noqa: ANN001, ANN202 -- no typing import either
    from echelon.dist.torch_backend.create import create

    return create(options, group_options)


def _stand_in() -> None:
    """Make the function that creates all of torch's groups use echelon's backend."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    make = c10d._new_process_group_helper
    code = make.__code__
    place = code.co_varnames[: code.co_argcount].index("backend")

    def make_ours(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        args = list(args)
        holder, key = (args, place) if len(args) > place else (kwargs, "backend")
        asked = str(holder[key])
        name = _name(asked)
        if name != asked:
            holder[key] = name if ":" in name else c10d.Backend(name)
            if "ProcessGroupGloo" in type(kwargs.get("backend_options")).__qualname__:
                kwargs["backend_options"] = None  # Gloo's own options mean nothing to ours
        return make(*args, **kwargs)

    c10d._new_process_group_helper = make_ours


def _name(asked):  # noqa: ANN001, ANN202
    """Return the backend, or a list such as "cpu:gloo,cuda:nccl", with echelon in gloo's place."""
    if asked in ("undefined", "None", ""):  # torch takes gloo, and on a GPU machine nccl beside it
        return f"cpu:{_OURS},cuda:nccl" if sys.modules["torch"].cuda.is_available() else _OURS
    if asked == "gloo":
        return _OURS
    parts = [part.partition(":") for part in asked.split(",")]
    if not all(name for _, _, name in parts):
        return asked
    return ",".join(f"{device}:{_OURS if name == 'gloo' else name}" for device, _, name in parts)
