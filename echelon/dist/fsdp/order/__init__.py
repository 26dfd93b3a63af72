"""Decide when units are gathered, released and reduced. The driver executes these decisions.

    events    a unit's forward begins or ends; the gradients of its outputs, of its inputs or of a
              parameter are ready; autograd ends; a step fails; the program holds or releases units
    actions   gather, wait, release, collect, reduce, finish, exchange, ... (`actions.py`)

`Order` turns each event into a list of actions for the driver. The modules in this folder never
import torch, start a collective or read a clock. The same events always produce the same actions,
so ranks that run the same model start the same collectives.
"""
