"""The c10d backend `echelon`: echelon's groups under unmodified torch programs.

`init_process_group("echelon")` needs no import of this package: see `echelon_torch_autoload`.
"""
