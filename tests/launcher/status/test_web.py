"""The live page: its state, its readers, and the page itself in a browser."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import threading
from urllib.parse import urlsplit

import pytest

from echelon.launcher.goodput.accounting import Category, Segment
from echelon.launcher.goodput.facts import Attempt, Job, Lap, RankRun, Spent, write_job
from echelon.launcher.incident.verdicts import WITHDRAWN
from echelon.launcher.status.show import main
from echelon.launcher.status.web.columns import columns
from echelon.launcher.status.web.page import page
from echelon.launcher.status.web.server import PageServer
from echelon.launcher.status.web.state import state_of

S = 1_000_000_000


@pytest.fixture
def run(tmp_path):
    """A run of two ranks, which failed once and runs again."""
    lap = Lap(
        first_step=0, end_step=4, began_ns=2 * S, ended_ns=10 * S, spent=Spent(waited_ns=2 * S)
    )
    again = Lap(first_step=2, end_step=6, began_ns=14 * S, ended_ns=18 * S)
    first = Attempt(
        number=0, began_ns=0, failed_ns=11 * S, ended_ns=12 * S, cause="dead_process",
        runs={rank: RankRun(host="node-a", laps=[lap], ended_ns=11 * S) for rank in range(2)},
    )  # fmt: skip
    runs = {0: RankRun(host="node-a", laps=[again], step=6, progress_ns=18 * S)}
    runs[1] = RankRun(host="<i>b</i>", laps=[again], step=6, progress_ns=5 * S)
    second = Attempt(number=1, began_ns=13 * S, runs=runs)
    folder = tmp_path / "run"
    folder.mkdir()
    write_job(Job(job_id="j", now_ns=20 * S, attempts=[first, second]), folder)
    incident = folder / "dump" / "incident_0"
    incident.mkdir(parents=True)
    (incident / "incident.json").write_text(
        '{"kind": "failure", "reason": "rank 1 was killed", "attempt": 0}'
    )
    verdict = {
        "cause": "dead_process", "culprit_ranks": [1], "confidence": "certain",
        "summary": "rank 1 ended by SIGKILL <script>faults.push('markup')</script>",
        "next_action": "See its log.",
    }  # fmt: skip
    (incident / "verdict.json").write_text(json.dumps({"verdict": verdict}))
    return folder


@pytest.fixture
def serve():
    """Serve a state at an address; return (host, port, token)."""
    made = []

    def begin(state, address="127.0.0.1"):
        server = PageServer(address, 0, state)
        thread = threading.Thread(target=server.serve, args=(0.01,), daemon=True)
        thread.start()
        made.append((server, thread))
        return server

    yield begin
    for server, thread in made:
        server.close()
        thread.join(60)


def _get(server, path, **headers):
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def test_a_column_shows_what_most_of_its_time_went_into():
    segments = [
        Segment(0, 10, {Category.START_UP: 10}),
        Segment(10, 40, {Category.USEFUL: 20, Category.WAITING: 10}),
        Segment(40, 45, {Category.STALL: 5}),
    ]
    assert columns(segments, 45, 9) == "bbuuuuuus"
    assert columns(segments, 45, 1) == "u"
    assert columns(segments, 45, 450).count("s") == 50
    assert columns([], 45, 3) == "   "
    assert columns([], 0, 3) == ""


def test_the_state_has_ranks_shares_and_verdicts(run):
    state = state_of(run)
    assert (state["job_id"], state["phase"], state["attempts"]) == ("j", "running", 2)
    assert 0 < state["goodput"] < 1
    assert abs(sum(state["shares"].values()) - 1) < 1e-9
    zero, one = state["ranks"]
    assert (zero["rank"], zero["host"], zero["step"]) == (0, "node-a", 6)
    assert one["lag_s"] >= 15
    assert set(zero["columns"]) >= {"b", "u", "r", "p"}
    (incident,) = state["incidents"]
    assert (incident["cause"], incident["ranks"]) == ("dead_process", [1])
    assert (incident["attempt"], incident["withdrawn"]) == (0, False)
    json.dumps(state)
    (run / "dump/incident_0/verdict.txt").write_text(f" VERDICT  straggler\n  {WITHDRAWN}\n")
    assert state_of(run)["incidents"][0]["withdrawn"]


def test_a_run_of_which_nothing_can_be_read_has_a_state(tmp_path):
    (tmp_path / "goodput.json").write_text("[")
    bad = tmp_path / "dump" / "incident_0"
    bad.mkdir(parents=True)
    (bad / "verdict.json").write_text('{"verdict": [1]}')
    (bad / "incident.json").write_text("[" * 100_000)
    state = state_of(tmp_path)
    assert (state["phase"], state["ranks"]) == ("starting", [])
    assert state["incidents"][0]["cause"] == ""


def test_a_job_that_is_over_says_how(run):
    write_job(Job(job_id="j", now_ns=20 * S, ended_by="worker", exit_code=137), run)
    assert state_of(run)["phase"] == "ended by worker, exit code 137"


def test_the_server_serves_the_page_and_the_state_only(serve):
    server = serve(lambda: {"a": 1})
    assert server.token == ""
    status, body, headers = _get(server, "/")
    assert (status, body) == (200, page())
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert _get(server, "/state")[:2] == (200, '{"a": 1}')
    for path in ("/job.json", "/../job.json", "/static/live.js", "//etc/passwd"):
        assert _get(server, path)[0] == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[", ""]
)
def test_a_page_of_another_site_cannot_read_it_under_its_own_name(host, serve):
    assert _get(serve(dict), "/state", Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:80"])
def test_this_machine_reads_it_under_its_own_names(host, serve):
    assert _get(serve(dict), "/state", Host=host)[0] == 200


def test_on_another_address_every_request_needs_the_token(serve):
    server = serve(dict, "0.0.0.0")
    assert server.url.endswith(f"/?token={server.token}")
    assert len(server.token) >= 32
    for path in ("/", "/state"):
        assert _get(server, path)[0] == 403
        assert _get(server, f"{path}?token={server.token[:-1]}")[0] == 403
        assert _get(server, f"{path}?token=%C3%A9%ff")[0] == 403
        assert _get(server, f"{path}?token={server.token}")[0] == 200


def test_the_page_loads_nothing_from_elsewhere():
    assert not re.search(r"https?://|@import|src=|url\(", page())


def test_a_run_that_is_not_there_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--web"]) == 2
    assert main(["--web", "node-a:29400"]) == 2
    assert main(["--web", "nothing"]) == 2
    assert capsys.readouterr().err.count("\n") == 3


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SPY = "<script>window.faults=[];addEventListener('error',e=>faults.push(e.message));</script>"
ACT = """<script>
const begun = setInterval(() => {
  if (document.documentElement.dataset.ready !== "yes") return;
  clearInterval(begun);
  const canvas = document.querySelector("#rank-0 canvas"), box = canvas.getBoundingClientRect();
  const move = {clientX: box.left + box.width / 2, clientY: box.top + 2};
  canvas.dispatchEvent(new PointerEvent("pointermove", move));
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, 1).data;
  const colors = new Set();
  for (let n = 0; n < pixels.length; n += 4) colors.add(pixels.slice(n, n + 3).join());
  const out = document.createElement("output");
  out.id = "seen";
  out.textContent = JSON.stringify({
    faults, colors: colors.size, rows: document.querySelectorAll(".row").length,
    goodput: document.getElementById("goodput").textContent,
    tip: document.getElementById("tip").textContent,
    verdict: document.querySelector(".incident p").textContent,
    injected: document.querySelectorAll("#rows i, #incidents script").length,
  });
  document.body.append(out);
}, 20);
</script>"""


@pytest.mark.parametrize("width", [1280, pytest.param(420, marks=pytest.mark.slow)])
def test_the_page_works_in_a_browser(width, run, tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no browser")
    # The state is put into the page: a file may not fetch.
    answer = (
        f"window.fetch = async () => ({{ok: true, json: async () => ({_script(state_of(run))})}});"
    )
    whole = page().replace("<head>", f"<head>{SPY}<script>{answer}</script>", 1)
    whole = whole.replace("</body>", ACT + "</body>", 1)
    path = tmp_path / "page.html"
    path.write_text(whole, encoding="utf-8")
    done = subprocess.run(
        [
            browser, "--headless", "--disable-gpu", "--no-sandbox",
            f"--user-data-dir={tmp_path / 'p'}", f"--window-size={width},900",
            "--virtual-time-budget=3000", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    found = re.search(r'<output id="seen">(.*?)</output>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    seen = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert (seen["faults"], seen["injected"]) == ([], 0)
    assert seen["rows"] == 2
    assert seen["colors"] >= 4
    assert seen["goodput"].endswith(" %")
    assert " at " in seen["tip"]
    assert seen["verdict"].startswith("rank 1 ended by SIGKILL <script>")


def _script(value) -> str:
    return json.dumps(value).replace("<", "\\u003c")
