"""Elect a new hosting node among the remaining nodes after the hosting node is lost."""
