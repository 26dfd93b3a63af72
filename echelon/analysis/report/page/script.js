// The timeline of the page: a canvas with zoom and hover, drawn from the embedded numbers.
// Recorded text is set by `textContent` or drawn on the canvas, never inserted as markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const line = data.timeline;
  const rows = line.rows;
  const bad = new Set(data.culprits);
  const canvas = document.getElementById("timeline");
  const tip = document.getElementById("tip");
  const pen = canvas.getContext("2d");
  const LEFT = 72; // of the labels, in pixels
  const TOP = 24; // of the axis
  const FONT = "12px system-ui, sans-serif";
  const SPAN = 3; // numbers per span: start, length (-1: open), name
  const OP = 5; // numbers per operation: start, length (-1: pending), kind, sequence, state
  const FAILED = 4; // a state
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const ops = [...new Set(line.kinds.map((kind) => kind.op))].sort();
  const hues = [215, 165, 265, 190, 300, 140, 240, 95, 330, 50];
  const hue = (op) => hues[ops.indexOf(op) % hues.length];
  const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;
  const fill = (op) => `hsl(${hue(op)} ${dark() ? "52% 58%" : "58% 52%"})`;
  const spanColor = () => `hsl(38 ${dark() ? "55% 34%" : "85% 78%"})`;
  const whole = [0, line.end * 1.02];
  let view = around(); // microseconds
  let scroll = 0; // pixels
  let height = rowHeight(); // of a row, in pixels
  const isNear = (n) => [n - 1, n + 1].some((other) => rows[other] && bad.has(rows[other].rank));

  function around() {
    if (line.stall < 0) return [0, line.end * 1.02];
    const before = Math.max(1, line.stall);
    const after = line.end - line.stall;
    const back = Math.min(before, Math.max(after * 0.6, 1));
    return [line.stall - back, line.stall + Math.min(after, Math.max(back, before)) * 1.03];
  }
  function rowHeight() {
    return Math.max(6, Math.min(26, Math.floor(520 / Math.max(1, rows.length))));
  }
  function size() {
    const ratio = devicePixelRatio || 1,
      width = canvas.clientWidth;
    const tall = TOP + Math.min(560, rows.length * height) + 2;
    canvas.style.height = tall + "px";
    canvas.width = width * ratio;
    canvas.height = tall * ratio;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    return [width, tall];
  }
  const x = (time, width) => LEFT + ((time - view[0]) / (view[1] - view[0])) * (width - LEFT);
  const time = (px, width) => view[0] + ((px - LEFT) / (width - LEFT)) * (view[1] - view[0]);
  function show(us) {
    const s = Math.abs(us) / 1e6;
    if (s >= 1) return (us / 1e6).toFixed(s < 10 ? 3 : 1) + " s";
    return s >= 0.001 ? (us / 1e3).toFixed(2) + " ms" : Math.round(us) + " us";
  }
  function ticks(width) {
    const room = (view[1] - view[0]) / Math.max(2, (width - LEFT) / 120);
    const base = 10 ** Math.floor(Math.log10(room)),
      step = [1, 2, 5, 10].map((n) => n * base).find((n) => n >= room);
    pen.font = FONT;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    for (let at = Math.ceil(view[0] / step) * step; at <= view[1]; at += step) {
      const px = x(at, width);
      pen.fillStyle = css("--grid");
      pen.fillRect(px, TOP, 1, canvas.clientHeight);
      if (px < width - 34 && px > LEFT + 20) {
        pen.fillStyle = css("--soft");
        pen.fillText(show(at), px, 12);
      }
    }
  }
  function first(ops_, at) {
    let low = 0,
      high = ops_.length / OP;
    while (low < high) {
      const mid = (low + high) >> 1;
      if (ops_[mid * OP] < at) low = mid + 1;
      else high = mid;
    }
    return Math.max(0, low - 40);
  }
  function draw() {
    const [width, tall] = size();
    pen.fillStyle = css("--card");
    pen.fillRect(0, 0, width, tall);
    ticks(width);
    for (let n = Math.floor(scroll / height); n < rows.length; n++) {
      const y = TOP + n * height - scroll;
      if (y > tall) break;
      drawRow(n, y, width);
    }
    if (line.stall >= 0 && x(line.stall, width) > LEFT) {
      pen.fillStyle = css("--bad");
      pen.fillRect(x(line.stall, width), TOP - 4, 1.5, tall);
    }
    pen.fillStyle = css("--card");
    pen.fillRect(0, 0, LEFT, TOP - 2);
    document.documentElement.dataset.view = view.map(Math.round).join(" ");
  }
  function drawRow(n, y, width) {
    const row = rows[n];
    if (bad.has(row.rank)) {
      pen.fillStyle = css("--bad-soft");
      pen.fillRect(LEFT, y, width - LEFT, height);
    }
    drawSpans(row, y, width);
    drawOperations(row, y, width);
    drawLabel(n, y);
  }
  function drawSpans(row, y, width) {
    pen.fillStyle = spanColor();
    for (let i = 0; i < row.spans.length; i += SPAN) {
      const long = row.spans[i + 1];
      const a = Math.max(LEFT, x(row.spans[i], width));
      const b = Math.min(width, x(long < 0 ? line.end : row.spans[i] + long, width));
      if (b < LEFT || a > width) continue;
      pen.fillRect(a, y + height / 3, Math.max(1, b - a), height / 3);
    }
  }
  function drawOperations(row, y, width) {
    const gap = height > 9 ? 3 : height > 3 ? 1 : 0;
    const pending = css("--pend");
    for (let i = first(row.ops, view[0]) * OP; i < row.ops.length; i += OP) {
      const [start, long, kind, number, state] = row.ops.slice(i, i + OP);
      if (start > view[1]) break;
      const isOpen = long < 0;
      const a = x(start, width);
      const b = x(isOpen ? line.end : start + long, width);
      if (b < LEFT) continue;
      const left = Math.max(LEFT, a);
      const wide = Math.max(1, Math.min(b, width) - left - (b - a > 4 ? 1 : 0));
      pen.fillStyle = isOpen || state === FAILED ? pending : fill(line.kinds[kind].op);
      pen.globalAlpha = isOpen ? 0.8 : 1;
      pen.fillRect(left, y + gap / 2, wide, height - gap);
      pen.globalAlpha = 1;
      if (wide > 70 && height > 14) drawName(`${line.kinds[kind].op} #${number}`, left, y, wide);
    }
  }
  function drawName(text, left, y, wide) {
    pen.fillStyle = "#fff";
    pen.textAlign = "left";
    pen.font = FONT;
    pen.save();
    pen.beginPath();
    pen.rect(left, y, wide - 4, height);
    pen.clip();
    pen.fillText(text, left + 6, y + height / 2 + 0.5);
    pen.restore();
  }
  function drawLabel(n, y) {
    const isBad = bad.has(rows[n].rank);
    const every = Math.max(1, Math.ceil(13 / height));
    const isDue = n % every === 0 && (height > 12 || !isNear(n));
    if (y < TOP - 2 || !(isDue || isBad)) return;
    pen.fillStyle = css("--card");
    if (isBad) pen.fillRect(0, y - (height < 13 ? 4 : 0), LEFT - 2, Math.max(height, 13));
    pen.fillStyle = css(isBad ? "--bad" : "--soft");
    pen.textAlign = "right";
    pen.font = (isBad ? "650 " : "") + FONT;
    pen.fillText("rank " + rows[n].rank, LEFT - 8, y + height / 2);
  }
  function clamp() {
    const most = Math.max(0, rows.length * height - (canvas.clientHeight - TOP));
    scroll = Math.min(Math.max(0, scroll), most);
    if (view[1] - view[0] < 2) view[1] = view[0] + 2;
  }
  function zoom(factor, px) {
    const width = canvas.clientWidth,
      at = px === undefined ? (view[0] + view[1]) / 2 : time(px, width);
    view = [at - (at - view[0]) * factor, at + (view[1] - at) * factor];
    const most = (whole[1] - whole[0]) * 1.5;
    if (view[1] - view[0] > most) view = [...whole];
    clamp();
    draw();
  }
  function reveal(rank) {
    const n = rows.findIndex((row) => row.rank === rank);
    scroll = n * height - 200;
    clamp();
    draw();
  }
  function under(event) {
    const box = canvas.getBoundingClientRect(),
      px = event.clientX - box.left,
      py = event.clientY - box.top;
    const n = Math.floor((py - TOP + scroll) / height),
      row = rows[n],
      at = time(px, box.width);
    if (!row || px < LEFT || py < TOP) return null;
    const slack = ((view[1] - view[0]) / box.width) * 2;
    let hit = null;
    for (let i = first(row.ops, view[0]) * OP; i < row.ops.length; i += OP) {
      if (row.ops[i] - slack > at) break;
      if (row.ops[i + 1] < 0 || row.ops[i] + row.ops[i + 1] + slack >= at) hit = i;
    }
    if (hit !== null) {
      const kind = line.kinds[row.ops[hit + 2]],
        long = row.ops[hit + 1];
      const lasts =
        long < 0 ? "still inside after " + show(line.end - row.ops[hit]) : "took " + show(long);
      return [
        "rank " + row.rank + " · " + kind.op + " #" + row.ops[hit + 3],
        kind.text,
        "group " + kind.group,
        kind.site,
        lasts,
      ];
    }
    for (let i = 0; i < row.spans.length; i += SPAN) {
      const long = row.spans[i + 1] < 0 ? line.end - row.spans[i] : row.spans[i + 1];
      if (row.spans[i] <= at && row.spans[i] + long >= at)
        return [
          "rank " + row.rank + " · " + line.names[row.spans[i + 2]],
          (row.spans[i + 1] < 0 ? "open for " : "took ") + show(long),
        ];
    }
    return null;
  }
  function hover(event) {
    const words = under(event);
    tip.style.display = words ? "block" : "none";
    if (!words) return;
    tip.replaceChildren(
      ...words.filter(Boolean).map((text, n) => {
        const part = document.createElement(n ? "span" : "b");
        part.textContent = text;
        return part;
      }),
    );
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + "px";
  }
  let grip = null;
  canvas.addEventListener("pointerdown", (event) => {
    grip = [event.clientX, event.clientY, ...view, scroll];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => {
    grip = null;
  });
  canvas.addEventListener("pointerleave", () => {
    tip.style.display = "none";
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!grip) return hover(event);
    const moved = ((event.clientX - grip[0]) / (canvas.clientWidth - LEFT)) * (grip[3] - grip[2]);
    view = [grip[2] - moved, grip[3] - moved];
    scroll = grip[4] - (event.clientY - grip[1]);
    clamp();
    draw();
  });
  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      if (event.shiftKey) {
        scroll += event.deltaY || event.deltaX;
        clamp();
        draw();
      } else
        zoom(
          Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.005),
          event.clientX - canvas.getBoundingClientRect().left,
        );
    },
    { passive: false },
  );
  canvas.addEventListener("dblclick", (event) =>
    zoom(0.4, event.clientX - canvas.getBoundingClientRect().left),
  );
  document.addEventListener("keydown", (event) => {
    const shift = (view[1] - view[0]) / 6;
    if (event.key === "+") zoom(0.6);
    else if (event.key === "-") zoom(1 / 0.6);
    else if (event.key === "ArrowLeft") {
      view = view.map((t) => t - shift);
      draw();
    } else if (event.key === "ArrowRight") {
      view = view.map((t) => t + shift);
      draw();
    }
  });
  const click = (id, act) => document.getElementById(id).addEventListener("click", act);
  click("in", () => zoom(0.5));
  click("out", () => zoom(2));
  click("fit", () => {
    view = [...whole];
    height = Math.min(rowHeight(), Math.max(0.5, 556 / rows.length));
    clamp();
    draw();
  });
  click("stall", () => {
    view = around();
    height = rowHeight();
    if (data.culprits.length) reveal(data.culprits[0]);
    else draw();
  });
  const legend = document.getElementById("legend");
  const entry = (color, text) => {
    const part = document.createElement("span"),
      dot = document.createElement("i");
    dot.style.background = color;
    part.append(dot, text);
    legend.append(part);
  };
  function legends() {
    legend.replaceChildren();
    ops.slice(0, 10).forEach((op) => entry(fill(op), op));
    entry(css("--pend"), "still inside, or failed");
    if (line.names.length) entry(spanColor(), line.names.slice(0, 6).join(", "));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    legends();
    draw();
  });
  addEventListener("resize", draw);
  legends();
  draw();
  if (data.culprits.length) reveal(data.culprits[0]);
  document.documentElement.dataset.ready = "yes";
})();
