"""Real oneCCL through its C API: Intel GPUs, and its CPU plugin where there is none."""
