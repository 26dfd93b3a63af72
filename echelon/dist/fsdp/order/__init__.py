"""When units are gathered, released and reduced: decided here, carried out by the driver.

    events    a unit's forward begins or ends; its outputs, a parameter, its inputs have their
              gradients; autograd ends; a step failed; the program holds units or lets them go
    actions   gather, wait, release, collect, reduce, finish, exchange, ... (`actions.py`)

`Order` takes one event at a time and returns the actions that the driver then carries out, in that
order. No module in this folder imports torch, starts a collective or reads a clock: equal events
give equal actions, so ranks whose models run alike stay in step, and every case can be tested as a
table.
"""
