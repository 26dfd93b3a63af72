"""The look of the HTML page: one sheet, light and dark by the reader's own setting."""
# ruff: noqa: E501 -- the lines of this string are CSS

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1a2230; --soft: #5b6678; --line: #dfe4ea;
  --bad: #c22f37; --bad-soft: #fdecec; --good: #1b7f4b; --good-soft: #e7f6ee;
  --mark: #b45309; --accent: #2f62d9; --code: #eef1f5; --grid: #e8ecf1; --pend: #d9454e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #11151b; --card: #191f28; --ink: #e4e9f0; --soft: #94a0b2; --line: #2b3442;
    --bad: #ff7b80; --bad-soft: #3a1d22; --good: #55c98b; --good-soft: #16301f;
    --mark: #f0a742; --accent: #7ba4ff; --code: #222a36; --grid: #232b37; --pend: #ef5f67;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 22px; line-height: 1.35; margin: 10px 0 0; font-weight: 650; overflow-wrap: anywhere; }
h2 { font-size: 13px; letter-spacing: .06em; text-transform: uppercase; color: var(--soft);
  margin: 0 0 12px; font-weight: 650; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px; margin-top: 16px; }
.verdict { border-left: 5px solid var(--bad); }
.verdict.well { border-left-color: var(--good); }
.tags { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; }
.tag { border-radius: 999px; padding: 2px 11px; font-size: 13px; background: var(--code); }
.tag.cause { background: var(--bad-soft); color: var(--bad); font-weight: 650; }
.well .tag.cause { background: var(--good-soft); color: var(--good); }
.next { margin: 14px 0 0; padding: 10px 14px; background: var(--code); border-radius: 8px; }
.next b { margin-right: 6px; }
.cols { display: grid; grid-template-columns: 2fr 1fr; gap: 26px; margin-top: 16px; }
@media (max-width: 760px) { .cols { grid-template-columns: 1fr; } }
ul { margin: 0; padding-left: 18px; } li { margin: 3px 0; overflow-wrap: anywhere; }
.small { color: var(--soft); font-size: 13px; margin: 10px 0 0; overflow-wrap: anywhere; }
dl { margin: 0; display: grid; grid-template-columns: auto 1fr; gap: 4px 14px; font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.bar { display: flex; gap: 8px; align-items: center; flex-wrap: wrap; margin-bottom: 10px; }
.bar h2 { margin: 0 auto 0 0; }
button { font: inherit; font-size: 13px; color: var(--ink); background: var(--code); cursor: pointer;
  border: 1px solid var(--line); border-radius: 7px; padding: 3px 11px; }
button:hover { border-color: var(--accent); } button:focus-visible { outline: 2px solid var(--accent); }
#frame { position: relative; border: 1px solid var(--line); border-radius: 8px; overflow: hidden; }
canvas { display: block; width: 100%; touch-action: none; cursor: grab; }
canvas:active { cursor: grabbing; }
#tip { position: fixed; pointer-events: none; max-width: 380px; background: var(--card); z-index: 9;
  border: 1px solid var(--line); border-radius: 8px; padding: 8px 11px; font-size: 13px;
  box-shadow: 0 4px 18px rgb(0 0 0 / .22); display: none; overflow-wrap: anywhere; }
#tip b { display: block; } #tip span { color: var(--soft); display: block; }
#legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin-top: 10px; font-size: 13px;
  color: var(--soft); }
#legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
.scroll { overflow-x: auto; }
svg text { font: 13px system-ui, sans-serif; fill: var(--ink); }
svg .edge { stroke: var(--soft); fill: none; stroke-width: 1.4; }
svg .label { fill: var(--soft); font-size: 12px; paint-order: stroke; stroke: var(--card); stroke-width: 4; }
svg rect { fill: var(--code); stroke: var(--line); } svg .bad rect { fill: var(--bad-soft); stroke: var(--bad); }
svg .bad text { fill: var(--bad); font-weight: 650; } svg marker path { fill: var(--soft); }
.stacks { display: flex; gap: 12px; overflow-x: auto; align-items: flex-start; }
.stack { flex: 1 0 270px; max-width: 520px; border: 1px solid var(--line); border-radius: 8px; }
.stack h3 { font-size: 14px; margin: 0; padding: 8px 12px; border-bottom: 1px solid var(--line); }
.stack.bad h3 { color: var(--bad); } .stack .small { margin: 0; padding: 6px 12px 0; }
.stack ol { list-style: none; margin: 0; padding: 8px 12px; font: 12.5px/1.55 ui-monospace, Menlo,
  Consolas, monospace; } .stack li { color: var(--soft); margin: 0; }
.stack li.own { color: var(--ink); } .stack li.here { color: var(--ink); font-weight: 650; }
.stack.bad li.here { color: var(--bad); }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 13px; }
th, td { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
td.n, th.n { text-align: right; white-space: nowrap; }
.phases { display: flex; height: 11px; border-radius: 3px; overflow: hidden; background: var(--grid);
  min-width: 140px; }
"""
