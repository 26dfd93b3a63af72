"""Real oneCCL through its C API: for Intel GPUs, or with its CPU plugin if there are none."""
