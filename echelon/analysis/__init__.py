"""Diagnose a job: `analyze(path)` reads a folder of black boxes and returns a `Report`."""

from echelon.analysis.diagnose import analyze
from echelon.analysis.finding import Cause, Confidence, Finding, Report
from echelon.analysis.report.text import render_text

__all__ = ["Cause", "Confidence", "Finding", "Report", "analyze", "render_text"]
