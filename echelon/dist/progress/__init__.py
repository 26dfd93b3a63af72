"""Manage operations in progress: how they are executed and waited for, and how they end."""
