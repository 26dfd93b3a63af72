"""The record of a torch program that did not ask for one: hooks into torch. None of them raises."""
