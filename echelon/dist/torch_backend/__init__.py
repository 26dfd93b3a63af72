"""The c10d backend `echelon`: our groups under unmodified torch programs.

`init_process_group("echelon")` needs no import of this: see `echelon_torch_autoload`.
"""
