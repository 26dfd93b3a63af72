"""What was measured of suspect nodes before an attempt is evidence of its verdict."""

from __future__ import annotations

from dataclasses import replace

from echelon.analysis.diagnose import diagnose
from echelon.analysis.evidence.model import Incident
from echelon.analysis.sources.load import read_incident
from tests.analysis.imagined_job import Job

_SAID = "the probe before attempt 3 measured on node-b (storage): 1 MiB in 4.0 ms"


def test_the_verdict_and_no_other_finding_says_it():
    job = Job(4)
    job[2].raised("ValueError", "bad")
    evidence = job.evidence()
    with_probes = replace(
        evidence, incident=Incident(kind="failure", world_size=4, probes=(_SAID,))
    )
    report = diagnose(with_probes)
    assert report.verdict is not None
    assert [_SAID in one.evidence for one in report.findings].count(True) == 1
    assert report.verdict.evidence[-1] == _SAID


def test_it_is_read_from_the_incident(tmp_path):
    path = tmp_path / "incident.json"
    path.write_text('{"probes": ["a", 1, "b"]}')
    assert read_incident(path).probes == ("a", "b")
    path.write_text('{"probes": "a"}')
    assert read_incident(path).probes == ()
