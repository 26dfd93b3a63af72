"""Diagnose jobs that left nothing but their ranks' logs."""
