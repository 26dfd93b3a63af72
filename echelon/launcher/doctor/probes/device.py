"""Check the health of this machine's GPUs with NVIDIA's management library (NVML).

The check does not change settings or reset devices. A device counts as broken if it does not
respond, has uncorrected memory errors, or has a bad memory row whose remapping is pending or has
failed. A throttled device counts as healthy, but the finding mentions it.
"""

from __future__ import annotations

from typing import Any

from echelon.launcher.doctor.probes.finding import DEVICE, Finding, State

_SLOWED = {0x8: "hardware slowdown", 0x40: "thermal slowdown", 0x80: "power brake"}


def probe_device() -> Finding:
    """Check every GPU; skip the check if `pynvml` is not installed or no driver responds."""
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return _skipped("pynvml is not installed (pip install nvidia-ml-py)")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as err:
        return _skipped(f"no NVIDIA driver responds ({err})")
    try:
        return judge(pynvml)
    except pynvml.NVMLError as err:
        return Finding(probe=DEVICE, state=State.BROKEN, text=f"NVML does not respond: {err}")
    finally:
        pynvml.nvmlShutdown()


def judge(nvml: Any) -> Finding:
    """Check all devices that NVML lists.

    Args:
        nvml: the `pynvml` module, already initialized.

    Raises:
        nvml.NVMLError: NVML cannot list the devices.
    """
    number = nvml.nvmlDeviceGetCount()
    if not number:
        return _skipped("no GPU on this machine")
    broken: list[str] = []
    notes: list[str] = []
    hottest = 0
    for index in range(number):
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            hottest = max(hottest, nvml.nvmlDeviceGetTemperature(device, 0))
        except nvml.NVMLError as err:
            broken.append(f"GPU {index}: {err}")
            continue
        broken += [f"GPU {index}: {what}" for what in _faults(nvml, device)]
        notes += [f"GPU {index}: {what}" for what in _slowdowns(nvml, device)]
    figures = {"devices": float(number), "hottest_celsius": float(hottest)}
    if broken:
        text = "; ".join(broken)
        return Finding(probe=DEVICE, state=State.BROKEN, text=text, figures=figures)
    gpus = "1 GPU responds" if number == 1 else f"{number} GPUs respond"
    text = "; ".join([f"{gpus}, {hottest} C at most", *notes])
    return Finding(probe=DEVICE, state=State.WHOLE, text=text, figures=figures)


def _faults(nvml: Any, device: Any) -> list[str]:
    """Return the faults that make a device unfit for use.

    A value that the device or its driver does not report counts as healthy.
    """
    found = []
    errors = _asked(nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(device, 1, 0))
    if errors:
        found.append(f"{errors} uncorrected memory errors")
    rows = _asked(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(device))
    if rows and rows[3]:
        found.append("remapping of a bad memory row failed")
    elif rows and rows[2]:
        found.append("a bad memory row is waiting to be remapped: reset the device")
    return found


def _slowdowns(nvml: Any, device: Any) -> list[str]:
    reasons = _asked(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)) or 0
    return [name for bit, name in _SLOWED.items() if reasons & bit]


def _asked(nvml: Any, question: Any) -> Any:
    try:
        return question()
    except (nvml.NVMLError, AttributeError):  # consumer devices and old drivers lack some calls
        return None


def _skipped(why: str) -> Finding:
    return Finding(probe=DEVICE, state=State.SKIPPED, text=why)
