"""Let any rank request an action that all ranks then perform at the same step."""
