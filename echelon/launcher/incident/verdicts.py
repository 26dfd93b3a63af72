"""Track the incidents that are being analyzed, and show their verdicts.

The verdict on a stall is shown immediately. The verdict on a failure is shown after the attempt has
ended, because only then are all affected ranks known. If ranks make progress before the verdict on
a stall is shown, the verdict is withdrawn.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.launcher.incident.explain import Analysis, Explanation
from echelon.launcher.incident.story import Victims
from echelon.launcher.job.report import Incident
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.output.output import Terminal

_POLL_S = 0.02
WITHDRAWN = "withdrawn: the ranks made progress"  # the last line of such a verdict's text


@dataclass(slots=True)
class _Open:
    """An incident whose verdict has been neither shown nor withdrawn.

    Attributes:
        nodes: the nodes that show the verdict.
        is_due: whether the verdict can be shown as soon as it is available.
    """

    incident: Incident
    nodes: Sequence[str]
    analysis: Analysis | None
    is_due: bool
    explanation: Explanation | None = None


class Verdicts:
    """The analyses of one job's incidents.

    Args:
        show_others: a function that shows text on the given nodes.
        note: a function that is called with each incident after its verdict is shown or withdrawn.
    """

    def __init__(
        self,
        directory: RunDirectory,
        terminal: Terminal,
        show_others: Callable[[Sequence[str], str], None],
        note: Callable[[Incident], None] = lambda _: None,
    ) -> None:
        self._note = note
        self._directory = directory
        self._terminal = terminal
        self._show_others = show_others
        self._next: Analysis | None = None
        self._why_none = ""
        self._open: list[_Open] = []

    @property
    def num_open(self) -> int:
        """The number of incidents whose verdict is pending."""
        return len(self._open)

    def is_open(self, incident: Incident) -> bool:
        """Return whether an incident's verdict is pending."""
        return any(one.incident is incident for one in self._open)

    def expect(self, *, gives_way: bool) -> None:
        """Start an analysis process for an incident that is about to be collected.

        Args:
            gives_way: whether running ranks have priority over the analysis.
        """
        self.expect_none()
        try:
            self._next = Analysis(gives_way=gives_way)
        except OSError as err:  # printed when there is something to explain
            self._why_none = err.strerror or str(err)

    def expect_none(self) -> None:
        """Stop the analysis process that `expect` started, because there is no incident."""
        if self._next is not None:
            self._next.close()
            self._next = None

    def begin(self, incident: Incident, nodes: Sequence[str], *, is_due: bool) -> None:
        """Start analyzing an incident; once the verdict is available, show it on `nodes`.

        If `is_due` is False, the verdict is not shown until `release` is called.
        """
        analysis, self._next = self._next, None
        one = _Open(incident, list(nodes), analysis, is_due)
        shown = self._directory.shown / "dump" / incident.folder.name
        if analysis is None:
            why = self._why_none
            text = f"echelon: no analysis could be started ({why}); run fr-analyze {shown}\n"
            one.explanation = Explanation(None, None, text)
        else:
            analysis.begin(incident.folder, shown, self._terminal.error_columns)
        self._open.append(one)

    def withdraw(self, incident: Incident) -> None:
        """Withdraw the verdict on a stall that has cleared."""
        if any(one.incident is incident for one in self._open):
            incident.withdrawn = True

    def drop(self, incident: Incident) -> None:
        """Discard an incident that has been replaced; its verdict will not be shown."""
        for one in [one for one in self._open if one.incident is incident]:
            self._open.remove(one)
            if one.analysis is not None:
                one.analysis.close()

    def release(self) -> None:
        """Allow all verdicts to be shown, now that the attempt has ended."""
        for one in self._open:
            one.is_due = True

    def deadline_s(self) -> float:
        """Return the monotonic time of the next `poll`; infinity if no verdict is pending."""
        return time.monotonic() + _POLL_S if self._open else float("inf")

    def poll(self) -> None:
        """Show all verdicts that are both available and due."""
        for one in list(self._open):
            if one.explanation is None and one.analysis is not None:
                one.explanation = one.analysis.poll()
                if one.explanation is not None:
                    one.analysis.close()
            if one.explanation is not None and one.is_due:
                self._open.remove(one)
                self._show(one, one.explanation)

    def close(self) -> None:
        """Stop all analysis processes."""
        self.expect_none()
        while self._open:
            analysis = self._open.pop().analysis
            if analysis is not None:
                analysis.close()

    def _show(self, one: _Open, explanation: Explanation) -> None:
        incident = one.incident
        verdict: dict[str, Any] | None = explanation.verdict
        ended = {rank: end for rank, end in incident.ended.items() if not end.is_new}
        victims = Victims.of(verdict, ended, incident.lost_earlier)
        incident.verdict = verdict
        incident.root_cause = explanation.story
        incident.circumstances = explanation.circumstances
        incident.victims = victims.to_json()
        line = victims.line()
        line = f"  {line}\n" if line else ""
        if incident.withdrawn:
            line += f"  {WITHDRAWN}\n"
            folder = self._directory.shown / "dump" / incident.folder.name
            self._terminal.say(
                f"the stall cleared, so its verdict is withdrawn; the evidence is in {folder}"
            )
        else:
            self._terminal.write_error(explanation.text + line)
            self._show_others(one.nodes, explanation.text + line)
        with contextlib.suppress(OSError):  # a full disk
            explanation.keep(incident.folder, line)
        self._note(incident)
